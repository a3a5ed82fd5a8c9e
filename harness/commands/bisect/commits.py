"""Bisection over the commits of a checkout, by `git bisect` on a scratch worktree.

git decides which commit comes next and what follows; this file looks at the two ends and at each commit that git checks out,
tells git which side it is on, and reads the answer.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from pathlib import Path

from eagletwin.harness.core.errors import HarnessError, InputError
from eagletwin.harness.core.run_spec import ENGINES, Engine

from ..options import nothing_run
from .report import VersionsOutcome, fault_between, outcome_of, progress_line
from .state import BisectionFolder, Fault, Found, Looked, Unclear, end_mark, mark

# A scratch worktree of the user's repository: its checkout, HEAD, index and bisections are left alone.
#
# Git keeps HEAD, index and everything about a bisection for each worktree. Hooks do not run; nothing is fetched.

GIT = ("git", "-c", f"core.hooksPath={os.devnull}", "-c", "advice.detachedHead=false", "-c", "gc.auto=0")


def environment() -> dict[str, str]:
    """Git's: not that of a hook or a bisection from which we were called, and English."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return kept | {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "GIT_LFS_SKIP_SMUDGE": "1"}


def git(folder: Path, *words: str, codes: Container[int] = (0,)) -> str:
    """What a git command prints. Raises InputError, unless it ends with one of these codes."""
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
    if done.returncode not in codes:
        raise nothing_run(
            f"git {words[0]} in {folder}: {done.stderr.strip() or f'exit code {done.returncode}'}",
            "name a repository and two commits of it",
        )
    return done.stdout.strip()


def commit_of(repository: Path, name: str) -> str:
    """The full id of a commit. Raises InputError."""
    try:
        return git(repository, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    except InputError as error:
        raise nothing_run(f"{repository} has no commit {name!r}", "name a commit, a tag or a branch of it") from error


@contextmanager
def worktree(repository: Path, commit: str) -> Iterator[Path]:
    """A worktree in a temporary folder, at a commit."""
    scratch = Path(tempfile.mkdtemp(prefix="eagletwin-bisect-")).resolve()
    tree = scratch / "tree"
    try:
        git(repository, "worktree", "add", "--detach", "--force", str(tree), commit)
        yield tree
    finally:
        try:
            if tree.exists():
                git(repository, "worktree", "remove", "--force", "--force", str(tree))
        except InputError as error:
            raise HarnessError(
                f"the scratch worktree {tree} could not be taken from the repository: {error.cause}",
                consequence="its record is left in the repository's .git/worktrees",
                remedy="`git worktree prune` there",
            ) from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


# What git calls the two sides: of a bug that came, and of one that was fixed. (older, newer)
TERMS = {True: ("good", "bad"), False: ("broken", "fixed")}
Look = Callable[[str, Path], Looked]  # at a commit, in the tree that it is checked out in


def ends_of(repository: Path, one: str, other: str) -> tuple[str, str]:
    """The two commits, the older one first; of two that are not one another's ancestors, in the order given. Raises
    InputError."""
    git(repository, "rev-parse", "--git-dir")  # where there is no repository, that is what is wrong, and not the commits' names
    commits = commit_of(repository, one), commit_of(repository, other)
    if commits[0] == commits[1]:
        raise nothing_run(f"{one} and {other} are one commit", "name a good commit and a bad one")
    bases = git(repository, "merge-base", *commits).splitlines()
    return (commits[1], commits[0]) if bases == [commits[1]] else commits


def bisect_commits(run: BisectionFolder, look: Look) -> VersionsOutcome:
    """Search between the plan's two commits. What is known already is not looked at again."""
    plan, looked = run.state.plan, run.state.looked
    repository, rule = Path(plan.checkout), plan.rule or plan.expected
    names = {commit: _name(repository, commit) for commit in plan.versions}
    with worktree(repository, plan.versions[0]) as tree:
        for commit in plan.versions:
            if commit not in looked:
                git(tree, "checkout", "--force", "--detach", commit)
            _look_at(run, tree, commit, look)
        if any(end_mark(looked[commit], rule) == "skip" for commit in plan.versions):
            return outcome_of(plan.versions, looked, None, rule, unclear="an end cannot be decided", names=names)
        try:
            fault = fault_between(plan.versions, looked, rule, anywhere=bool(plan.rule))
        except Unclear as error:
            return outcome_of(plan.versions, looked, None, rule, unclear=str(error), names=names)
        outcome = outcome_of(plan.versions, looked, fault, rule, names=names)
        if fault is None or outcome.found.came is None:
            run.state.finished = True
            return outcome
        last, suspects = _search(run, tree, fault, outcome.found.came, look)
    run.state.finished = True
    versions = (last, *suspects)
    found = Found(0, len(suspects), outcome.found.came, tuple(range(1, len(suspects))), ())
    # by date; commits that are not one another's ancestors have no other order
    seen = {commit: looked[commit] for commit in git(repository, "rev-list", "--no-walk=sorted", *looked).split()[::-1]}
    return VersionsOutcome(
        versions, seen, found, fault, rule, names={one: _name(repository, one) for one in {*versions, *seen}}
    )


def _look_at(run: BisectionFolder, tree: Path, commit: str, look: Look) -> Looked:
    """What is known of the commit that the tree is at, or what a look says of it."""
    looked, name = run.state.looked, _name(tree, commit)
    if (known := commit in looked) is False:
        run.tell(f"{name}: looking …")
        run.add(look(commit, tree))
    run.tell(f"{name}: {progress_line(looked[commit]).partition(': ')[2]}{', known before' * known}")
    return looked[commit]


def _search(run: BisectionFolder, tree: Path, fault: Fault, came: bool, look: Look) -> tuple[str, list[str]]:
    """The last commit before the change that was looked at, and those that may have made it, oldest first.

    One of them made it; if several are named, those before the last cannot be decided.
    """
    (old, new), (before, after) = run.state.plan.versions, TERMS[came]
    words = {"good": before if came else after, "bad": after if came else before, "skip": "skip"}
    paths = _paths(tree, run.state.plan.subject.run.mode.engine, old, new)
    suspects = _suspects(tree, new, [old], paths)
    if len(suspects) > 1:
        start = ["bisect", "start", f"--term-old={before}", f"--term-new={after}", new, old, "--", *paths]
        run.tell(f"git {' '.join(start)}")
        said = git(tree, *start)
        while said.startswith("Bisecting:"):
            run.tell(said.splitlines()[0])
            verdict, why = mark(_look_at(run, tree, git(tree, "rev-parse", "HEAD"), look), fault)
            if verdict == "skip":
                run.tell(f"skipped: {why}")
            # 2: only commits that cannot be decided are left
            said = git(tree, "bisect", words[verdict], codes=(0, 2))
        (run.folder / "git-bisect.log").write_text(git(tree, "bisect", "log") + "\n", encoding="utf-8")
        olds = git(tree, "for-each-ref", "--format=%(objectname)", f"refs/bisect/{before}-*").split()
        suspects = _suspects(tree, git(tree, "rev-parse", f"refs/bisect/{after}"), olds, paths)
        old = git(tree, "merge-base", "--independent", *olds).split()[0]
    if not suspects:
        raise HarnessError(
            f"git finds no commit between {old} and {new}" + (f" that changes {paths[0]}" if paths else ""),
            consequence="the ends differ, and nothing that git shows made the difference",
            remedy="look at the two commits: submodules and files that a filter makes are not looked at",
        )
    return old, suspects


def _paths(tree: Path, engine: Engine, *commits: str) -> tuple[str, ...]:
    """Where the engine's Python lies: commits that change nothing there need not be looked at. (): anywhere."""
    folder = ENGINES[engine].folder
    package = f"{folder}/{engine}".lstrip("/")
    lies = [git(tree, "ls-tree", "--name-only", commit, f"{package}/__init__.py") for commit in commits]
    return (folder or package,) if all(lies) else ()


def _suspects(tree: Path, new: str, olds: list[str], paths: tuple[str, ...]) -> list[str]:
    return git(tree, "rev-list", "--reverse", new, *(f"^{old}" for old in olds), "--", *paths).split()


def _name(repository: Path, commit: str) -> str:
    """Short id and subject."""
    return git(repository, "log", "-1", "--format=%h %s", commit)[:100]
