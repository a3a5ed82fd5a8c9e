"""A local git repository whose commits are source trees of SGLang, made from unpacked releases: something real to bisect."""

import os
import subprocess
from pathlib import Path

# Of no use to a scheduler, and half of a release.
LEFT_OUT = (":(exclude)sglang/multimodal_gen", ":(exclude)*.so", ":(exclude)**/__pycache__")
WHO = {
    f"GIT_{role}_{what}": value for role in ("AUTHOR", "COMMITTER") for what, value in (("NAME", "t"), ("EMAIL", "t@localhost"))
}


class History:
    """A repository at `path`; each commit follows the one before. Nothing is checked out."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.commits: list[str] = []
        path.mkdir()
        self.git("init", "--quiet", "--initial-branch=main")
        self.git("config", "core.compression", "0")  # packing a release takes three times what all else of it takes

    def git(self, *words: str, stdin: str = "", **environment: str) -> str:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        done = subprocess.run(
            ["git", "-C", str(self.path), *words],
            env=kept | WHO | {"GIT_AUTHOR_DATE": self._date, "GIT_COMMITTER_DATE": self._date} | environment,
            input=stdin,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    @property
    def _date(self) -> str:
        return f"{1_700_000_000 + 60 * len(self.commits)} +0000"

    def tree_of(self, unpacked: Path) -> str:
        """The tree object of the package in a folder that holds sglang/."""
        index = {"GIT_INDEX_FILE": str(self.path / ".git" / "scratch-index"), "GIT_WORK_TREE": str(unpacked)}
        self.git("read-tree", "--empty", **index)
        self.git("add", "--force", "--", str(unpacked / "sglang"), *LEFT_OUT, **index)
        return self.git("rev-parse", f"{self.git('write-tree', **index)}:sglang")

    def with_file(self, package: str, path: str, text: str) -> str:
        """A package tree in which one file is another."""
        index = {"GIT_INDEX_FILE": str(self.path / ".git" / "scratch-index")}
        self.git("read-tree", package, **index)
        self.git("update-index", "--add", "--cacheinfo", f"100644,{self._blob(text)},{path}", **index)
        return self.git("write-tree", **index)

    def _blob(self, text: str) -> str:
        return self.git("hash-object", "-w", "--stdin", stdin=text)

    def commit(self, subject: str, package: str, *, transformers: str) -> str:
        """A commit of a checkout of SGLang: python/sglang, and python/pyproject.toml with the one pin that matters."""
        project = self._blob(f'[project]\nname = "sglang"\ndependencies = ["transformers=={transformers}"]\n')
        python = self.git("mktree", stdin=f"100644 blob {project}\tpyproject.toml\n040000 tree {package}\tsglang\n")
        top = self.git("mktree", stdin=f"040000 tree {python}\tpython\n")
        parent = ["-p", self.commits[-1]] if self.commits else []
        self.commits.append(self.git("commit-tree", top, *parent, "-m", subject))
        self.git("update-ref", "refs/heads/main", self.commits[-1])
        return self.commits[-1]
