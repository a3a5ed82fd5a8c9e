"""Bisection over the commits of a checkout: `git bisect run`, driven on a scratch worktree. step.py is what it runs.

git decides which commit comes next and what follows; this file makes sure of the two ends, tells git which of them is which,
and reads the answer.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from eagletwin.harness.core.errors import HarnessError, InputError
from eagletwin.harness.core.files import RUN_MODULE

from .report import VersionsOutcome, fault_between, outcome_of, progress_line
from .state import BisectionFolder, Found, Looked, Unclear, end_mark

# A scratch worktree of the user's repository: its checkout, HEAD, index and bisections are left alone.
#
# Git keeps HEAD, index and everything about a bisection for each worktree. Hooks do not run; nothing is fetched.

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


# What git calls the two sides: of a bug that came, and of one that was fixed. (older, newer)
TERMS = {True: ("good", "bad"), False: ("broken", "fixed")}
STEP = (*RUN_MODULE, "eagletwin.door", "eagletwin.harness.commands.bisect.step:main")
SAID = "eagletwin: "  # a step's own lines begin with it
PATIENCE = 20.0  # seconds that a step has to end itself when the bisection is interrupted


def ends_of(repository: Path, one: str, other: str) -> tuple[str, str]:
    """The two commits, the older one first; of two that are not one another's ancestors, in the order given. Raises
    InputError."""
    git(repository, "rev-parse", "--git-dir")  # where there is no repository, that is what is wrong, and not the commits' names
    commits = commit_of(repository, one), commit_of(repository, other)
    if commits[0] == commits[1]:
        raise InputError(
            f"{one} and {other} are one commit",
            consequence="nothing was run",
            remedy="name a good commit and a bad one",
        )
    bases = git(repository, "merge-base", *commits).splitlines()
    return (commits[1], commits[0]) if bases == [commits[1]] else commits


def bisect_commits(run: BisectionFolder, look: Callable[[str, Path], Looked]) -> VersionsOutcome:
    """Search between the plan's two commits; look(commit, tree) looks at an end. Steps look by themselves."""
    plan, looked = run.state.plan, run.state.looked
    repository, rule = Path(plan.checkout), plan.rule or plan.expected
    names = {commit: _name(repository, commit) for commit in plan.versions}
    with Worktree(repository, plan.versions[0]) as tree:
        for commit in plan.versions:
            if commit not in looked:
                run.tell(f"{names[commit]}: looking …")
                tree.checkout(commit)
                run.add(look(commit, tree.path))
                run.tell(f"{names[commit]}: {progress_line(looked[commit]).partition(': ')[2]}")
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
        run.state.fault, run.state.old_is_bad = fault, not outcome.found.came
        run.save()
        last, suspects = _search(run, tree, outcome.found.came)
    run.state.finished = True
    versions = (last, *suspects)
    found = Found(0, len(suspects), outcome.found.came, tuple(range(1, len(suspects))), ())
    looked = run.state.looked
    # by date; commits that are not one another's ancestors have no other order
    seen = {commit: looked[commit] for commit in git(repository, "rev-list", "--no-walk=sorted", *looked).split()[::-1]}
    return VersionsOutcome(
        versions, seen, found, fault, rule, names={one: _name(repository, one) for one in {*versions, *seen}}
    )


def _search(run: BisectionFolder, tree: Worktree, came: bool) -> tuple[str, list[str]]:
    """The last commit before the change that was looked at, and those that may have made it, oldest first.

    One of them made it; if several are named, those before the last cannot be decided.
    """
    (old, new), (before, after) = run.state.plan.versions, TERMS[came]
    paths = _paths(tree.path, old, new)
    suspects = _suspects(tree.path, new, [old], paths)
    if len(suspects) > 1:
        words = ["bisect", "start", f"--term-old={before}", f"--term-new={after}", new, old, "--", *paths]
        run.tell(f"git {' '.join(words)}")
        git(tree.path, *words)
        code, last_words = _run_steps(run, tree)
        (run.folder / "git-bisect.log").write_text(git(tree.path, "bisect", "log") + "\n", encoding="utf-8")
        if run.state.failure or code not in (0, 2):  # 2: only commits that cannot be decided are left
            raise HarnessError(
                f"git bisect run stopped: {run.state.failure or last_words or f'exit code {code}'}",
                consequence="what is known is kept; git stops at exit codes of 128 and more, which are not verdicts",
                remedy=f"see {run.folder / 'git-bisect.txt'}, remove the cause, and give the same command again",
            )
        olds = git(tree.path, "for-each-ref", "--format=%(objectname)", f"refs/bisect/{before}-*").split()
        suspects = _suspects(tree.path, git(tree.path, "rev-parse", f"refs/bisect/{after}"), olds, paths)
        old = git(tree.path, "merge-base", "--independent", *olds).split()[0]
    if not suspects:
        raise HarnessError(
            f"git finds no commit between {old} and {new}" + (f" that changes {paths[0]}" if paths else ""),
            consequence="the ends differ, and nothing that git shows made the difference",
            remedy="look at the two commits: submodules and files that a filter makes are not looked at",
        )
    return old, suspects


def _run_steps(run: BisectionFolder, tree: Worktree) -> tuple[int, str]:
    """Let git run the steps; its exit code and last line. In a session of its own: an interrupt reaches all of it, once."""
    last_words = ""
    with (
        (run.folder / "git-bisect.txt").open("a", encoding="utf-8") as log,
        subprocess.Popen(
            [*GIT, "bisect", "run", *STEP, str(run.folder.absolute())],
            cwd=tree.path,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                last_words = line.strip() or last_words
                if line.startswith((SAID, "Bisecting:")):
                    run.tell(line.removeprefix(SAID).rstrip())
            return process.wait(), last_words
        except BaseException:
            _end(process)
            raise
        finally:
            run.reload()


def _end(process: "subprocess.Popen[str]") -> None:
    """End git and the step that it runs, which ends its engines. git goes at once, a step when it has cleaned up.

    Not by an interrupt: what a shell starts in the background, or nohup, ignores it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        until = time.monotonic() + PATIENCE
        try:
            os.killpg(process.pid, number)
            while time.monotonic() < until:
                process.poll()
                os.killpg(process.pid, 0)
                time.sleep(0.05)
        except ProcessLookupError:
            return


def _paths(tree: Path, *commits: str) -> tuple[str, ...]:
    """Where SGLang's Python lies: commits that change nothing there need not be looked at. (): anywhere."""
    lies = [git(tree, "ls-tree", "--name-only", commit, "python/sglang/__init__.py") for commit in commits]
    return ("python",) if all(lies) else ()


def _suspects(tree: Path, new: str, olds: list[str], paths: tuple[str, ...]) -> list[str]:
    return git(tree, "rev-list", "--reverse", new, *(f"^{old}" for old in olds), "--", *paths).split()


def _name(repository: Path, commit: str) -> str:
    """Short id and subject."""
    return git(repository, "log", "-1", "--format=%h %s", commit)[:100]
