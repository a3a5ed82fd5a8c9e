"""What `git bisect run` runs at each commit, in the scratch worktree: `main`, through eagletwin.door.

Exit codes are git's: 0 for a commit like the older end, 1 for one like the newer, 125 for one that cannot be decided, and 128
or more, by which git stops: the harness itself failed, which says nothing about the commit.
"""

import sys
from pathlib import Path

from eagletwin.harness.core.errors import (
    EXIT_DIVERGED,
    EXIT_EQUAL,
    EXIT_UNKNOWN,
    EXIT_USAGE,
    EagletwinError,
    HarnessError,
    InputError,
    run_guarded,
)

from .commits import SAID, git
from .measure import look_at_version
from .report import progress_line
from .state import BisectionFolder, mark, read_state


def step(folder: Path, tree: Path) -> int:
    """Look at the commit in `tree`, unless the bisection in `folder` knows it already."""
    run = BisectionFolder(folder, read_state(folder))
    state, commit = run.state, git(tree, "rev-parse", "HEAD")
    if state.fault is None:  # what `eagletwin bisect` wrote, which is another process
        raise HarnessError(
            f"the bisection in {folder} does not say what to look for",
            consequence="nothing was run at this commit",
            remedy="start `eagletwin bisect --git` again: it looks at the two ends before the first step",
        )
    name = git(tree, "log", "-1", "--format=%h %s", commit)
    known = commit in state.looked
    if not known:
        print(f"{SAID}{name}: looking …", flush=True)
        run.add(look_at_version(commit, str(tree), state.plan.subject, folder, again=""))
    verdict, why = mark(state.looked[commit], state.fault)
    print(
        f"{SAID}{name}: {progress_line(state.looked[commit]).partition(': ')[2]}{', known before' if known else ''}", flush=True
    )
    if verdict == "skip":
        print(f"{SAID}skipped: {why}", flush=True)
        return EXIT_UNKNOWN
    return EXIT_DIVERGED if (verdict == "bad") != state.old_is_bad else EXIT_EQUAL


def main() -> int:
    """Entry point: every failure is kept where the bisection that waits for it looks."""
    if len(sys.argv) != 2:
        print("error: this is a part of `eagletwin bisect --git`", file=sys.stderr)
        return EXIT_USAGE
    folder = Path(sys.argv[1])

    def run() -> int:
        try:
            return step(folder, Path.cwd())
        except (EagletwinError, OSError) as error:
            _keep(folder, str(error))
            raise
        except Exception as error:
            _keep(folder, f"{type(error).__name__}: {error}")
            raise

    return run_guarded(run)


def _keep(folder: Path, failure: str) -> None:
    try:
        run = BisectionFolder(folder, read_state(folder))
    except InputError:
        return
    run.state.failure = failure
    run.save()


if __name__ == "__main__":  # what is imported above is not guarded here
    print("error: this is a part of `eagletwin bisect --git`, which runs it through eagletwin.door", file=sys.stderr)
    sys.exit(EXIT_USAGE)
