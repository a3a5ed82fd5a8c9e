"""A bisection's run folder: what is looked for, the results of its versions so far, and the log. One process at a time writes.

`bisect.json` is written anew after each version, so that a bisection that was interrupted can be taken up again: the same
command finds the unfinished folder of the same plan and goes on there. Versions that could not be decided are looked at again.
"""

import fcntl
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TextIO

import msgspec
from msgspec import Struct

from eagletwin import __version__
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.environment import installed
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.files import new_run_folder
from eagletwin.harness.core.run_spec import DEFAULT_RUN, RunSpec

from .marks import Fault, Looked

STATE, LOG = "bisect.json", "bisect.log"


class Subject(Struct, frozen=True, kw_only=True):
    """What is run on every version, and how; the versions are not `run.sglang`, but the bisection's."""

    case: Case
    run: RunSpec = DEFAULT_RUN


class BisectionPlan(Struct, frozen=True, kw_only=True):
    """What makes two bisections the same one.

    versions  releases, oldest first; or the two commits
    checkout  the repository that the commits are of; "": these are releases
    rule      the rule that was asked for; expected: the one that the case is known for
    eagletwin, torch  versions, which may tell differently
    """

    subject: Subject
    versions: tuple[str, ...]
    checkout: str = ""
    rule: str = ""
    expected: str = ""
    eagletwin: str = ""
    torch: str = ""


def plan_of(
    subject: Subject, versions: Sequence[str], *, checkout: str = "", rule: str = "", expected: str = ""
) -> BisectionPlan:
    """The plan of a bisection that is run here and now."""
    return BisectionPlan(
        subject=subject,
        versions=tuple(versions),
        checkout=checkout,
        rule=rule,
        expected=expected,
        eagletwin=__version__,
        torch=installed("torch"),
    )


class BisectionState(Struct, kw_only=True):
    """`fault` is what is looked for, once the ends have shown it; `old_is_bad`, for commits, whether the older end shows it."""

    plan: BisectionPlan
    looked: dict[str, Looked] = {}
    fault: Fault | None = None
    old_is_bad: bool = False
    seconds: float = 0.0
    finished: bool = False
    failure: str = ""  # of a step of `git bisect run`: why it could not go on


class BisectionFolder:
    """An open run folder. Use as a context manager: another process then leaves it alone."""

    def __init__(self, folder: Path, state: BisectionState, lock: TextIO | None = None) -> None:
        self.folder = folder
        self.state = state
        self.resumed = len(state.looked)  # versions that an earlier invocation looked at
        self._lock = lock
        self._begun = time.monotonic()
        self._before = state.seconds

    def __enter__(self) -> "BisectionFolder":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.save()
        if kind is not None:
            self.tell("not finished: the same command goes on from here")
        if self._lock is not None:
            self._lock.close()

    @property
    def seconds(self) -> float:
        """What the bisection took so far, earlier invocations included."""
        return self._before + time.monotonic() - self._begun

    def save(self) -> None:
        """Write the state, whole or not at all."""
        self.state.seconds = self.seconds
        partial = self.folder / f".{STATE}"
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(self.state)))
        os.replace(partial, self.folder / STATE)

    def add(self, looked: Looked) -> None:
        self.state.looked[looked.version] = looked
        self.save()

    def reload(self) -> None:
        """Take over what a step of `git bisect run`, a process of its own, has written."""
        self.state = read_state(self.folder)

    def tell(self, text: str) -> None:
        say(self.folder, text)


def say(folder: Path, text: str) -> None:
    """Progress: to stderr and the log in a run folder."""
    print(text, file=sys.stderr, flush=True)
    with (folder / LOG).open("a", encoding="utf-8") as log:
        log.write(text + "\n")


def read_state(folder: Path) -> BisectionState:
    """The state in a run folder. Raises InputError."""
    try:
        return msgspec.json.decode((folder / STATE).read_bytes(), type=BisectionState)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(
            f"{folder / STATE}: {error}",
            consequence="what was found there cannot be used",
            remedy="remove the folder; the bisection then begins anew",
        ) from error


def open_run(parent: Path, plan: BisectionPlan) -> BisectionFolder:
    """The run folder of this plan: an unfinished one that no other process works on, or a new one."""
    name = f"bisect-{plan.subject.case.name}"
    for folder in sorted(parent.glob(f"{name}*"), key=lambda path: path.name):
        if (folder / STATE).is_file() and (lock := _locked(folder)) is not None:
            state = _taken_up(folder, plan)
            if state is not None:
                return BisectionFolder(folder, state, lock)
            lock.close()
    folder = new_run_folder(parent, name)
    run = BisectionFolder(folder, BisectionState(plan=plan), _locked(folder))
    run.save()
    return run


def _taken_up(folder: Path, plan: BisectionPlan) -> BisectionState | None:
    """The state of an unfinished bisection of this plan; None: it is of another plan, or cannot be read."""
    try:
        state = read_state(folder)
    except InputError:
        return None
    if state.plan != plan or state.finished:
        return None
    state.looked = {
        version: looked for version, looked in state.looked.items() if looked.usual.rule or looked.usual.status != "unknown"
    }
    state.failure = ""
    return state


def _locked(folder: Path) -> TextIO | None:
    """A lock on the folder, held until it is closed; None: another process has it."""
    file = (folder / ".lock").open("a", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file
