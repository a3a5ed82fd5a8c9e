"""A scratch worktree of the user's repository: its checkout, HEAD, index and bisections are left alone.

Git keeps HEAD, index and everything about a bisection for each worktree. Hooks do not run; nothing is fetched.
"""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType

from eagletwin.harness.core.errors import HarnessError, InputError

GIT = ("git", "-c", f"core.hooksPath={os.devnull}", "-c", "advice.detachedHead=false", "-c", "gc.auto=0")


def environment() -> dict[str, str]:
    """Git's: not that of a hook or a bisection from which we were called, and English."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return kept | {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "GIT_LFS_SKIP_SMUDGE": "1"}


def git(folder: Path, *words: str) -> str:
    """What a git command prints. Raises InputError."""
    try:
        done = subprocess.run(
            [*GIT, "-C", str(folder), *words],
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError as error:
        raise InputError("git is not installed", consequence="no commit can be looked at", remedy="install git") from error
    if done.returncode:
        raise InputError(
            f"git {words[0]} in {folder}: {done.stderr.strip() or f'exit code {done.returncode}'}",
            consequence="nothing was run",
            remedy="name a repository and two commits of it",
        )
    return done.stdout.strip()


def commit_of(repository: Path, name: str) -> str:
    """The full id of a commit. Raises InputError."""
    try:
        return git(repository, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    except InputError as error:
        raise InputError(
            f"{repository} has no commit {name!r}",
            consequence="nothing was run",
            remedy="name a commit, a tag or a branch of it",
        ) from error


class Worktree:
    """A worktree in a temporary folder, at a commit. Use as a context manager."""

    def __init__(self, repository: Path, commit: str) -> None:
        self._repository = repository
        self._commit = commit
        self._scratch = Path()
        self.path = Path()

    def __enter__(self) -> "Worktree":
        self._scratch = Path(tempfile.mkdtemp(prefix="eagletwin-bisect-")).resolve()
        self.path = self._scratch / "sglang"
        try:
            git(self._repository, "worktree", "add", "--detach", "--force", str(self.path), self._commit)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._remove()

    def checkout(self, commit: str) -> None:
        """Go to a commit, whatever lies in the tree."""
        git(self.path, "checkout", "--force", "--detach", commit)

    def _remove(self) -> None:
        """Remove the worktree and git's record of it."""
        try:
            if self.path.exists():
                git(self._repository, "worktree", "remove", "--force", "--force", str(self.path))
        except InputError as error:
            raise HarnessError(
                f"the scratch worktree {self.path} could not be taken from the repository: {error.cause}",
                consequence="its record is left in the repository's .git/worktrees",
                remedy="`git worktree prune` there",
            ) from error
        finally:
            shutil.rmtree(self._scratch, ignore_errors=True)
