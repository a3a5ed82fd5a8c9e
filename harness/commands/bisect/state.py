"""A bisection's state: the marks of its versions, its run folder, and the log. One process at a time writes.

`bisect.json` is written anew after each version, so that a bisection that was interrupted can be taken up again: the same
command finds the unfinished folder of the same plan and goes on there. Versions that could not be decided are looked at again.
"""

import fcntl
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, TextIO

import msgspec
from msgspec import Struct, field

from eagletwin import __version__
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.files import installed_version, new_run_folder
from eagletwin.harness.core.run_spec import DEFAULT_RUN, RunSpec

# What several looks at one version say about one fault, and where a change lies in a row of versions. Pure.
#
# A look that shows the fault proves that it is there; one that does not proves little. So a version with a minority of such
# looks is neither good nor bad, and a divergence of another kind, which may hide the fault, makes none of the two.

Mark = Literal["good", "bad", "skip"]


@dataclass(frozen=True, slots=True)
class Found:
    """What is known of the row. All are indices.

    old, new  the versions next to the change on either side; `old` is that of the lower index. Both None: there are not two
              versions that can be decided. If `came` is None they are the outermost ones that can, and alike
    came      whether the change made good bad; False: bad good; None: no change was seen
    between   versions between `old` and `new`, none of which can be decided: the change is in one of them, or in `new`
    outside   versions beyond the outermost ones that can be decided
    """

    old: int | None
    new: int | None
    came: bool | None
    between: tuple[int, ...]
    outside: tuple[int, ...]

    @property
    def exact(self) -> bool:
        """Whether `new` is the first on its side."""
        return self.came is not None and not self.between


def next_end(count: int, known: Mapping[int, Mark]) -> int | None:
    """The next version to look at until both ends are decided: from either end inward. None: they are, or nothing is left."""
    low = next((index for index in range(count) if known.get(index) != "skip"), None)
    if low is None or low not in known:
        return low
    high = next(index for index in reversed(range(count)) if known.get(index) != "skip")
    return high if high not in known else None


def next_between(count: int, known: Mapping[int, Mark]) -> int | None:
    """The next version to look at once both ends are known. None: nothing more can be learned.

    The middle, but with some distance from what could not be decided: the neighbours of a version that does not start often do
    not start either, and need not be looked at if the change lies elsewhere.
    """
    found = conclude(count, known)
    if found.came is None or found.old is None or found.new is None:
        return None
    low, high = found.old, found.new
    skipped = [index for index in range(low + 1, high) if known.get(index) == "skip"]

    def merit(index: int) -> tuple[int, int]:
        halves = min(index - low, high - index)
        distance = min((abs(index - other) for other in skipped), default=count)
        return min(halves, 2 * distance), halves

    return max((index for index in range(low + 1, high) if index not in known), key=merit, default=None)


def conclude(count: int, known: Mapping[int, Mark]) -> Found:
    """The result so far, at any time; `between` also holds the versions that were not looked at yet."""
    decided = sorted(index for index, mark in known.items() if mark != "skip")
    if len(decided) < 2:
        return Found(None, None, None, (), tuple(index for index in range(count) if index not in decided))
    outside = tuple(index for index in range(count) if not decided[0] <= index <= decided[-1])
    before = known[decided[0]]
    if known[decided[-1]] == before:
        return Found(decided[0], decided[-1], None, (), outside)
    new = next(index for index in decided if known[index] != before)
    old = max(index for index in decided if index < new)
    return Found(old, new, before == "good", tuple(range(old + 1, new)), outside)


LOOKS = 3  # at each version, if they come out alike
MAX_LOOKS = 7  # if they do not: then the majority counts


class Sighting(Struct, frozen=True, kw_only=True):
    """The result of one look. `rule` and `place` are of the first divergence; `why` explains the result.

    vacuous  unknown only because the case did not reach what it is for, or what a patch edits; ran: an engine ran the case
    """

    status: Literal["equal", "diverged", "unknown"]
    rule: str = ""
    place: str = ""
    why: str = ""
    vacuous: bool = False
    ran: bool = True

    @property
    def kind(self) -> tuple[str, str, str]:
        """What two looks must share to have come out alike."""
        return (self.status, self.rule, self.place)


class Looked(Struct, frozen=True, kw_only=True):
    """A version and all looks at it, at least one. `seconds`: what it took, importing and building included."""

    version: str
    sightings: tuple[Sighting, ...]
    seconds: float = 0.0

    @property
    def runs(self) -> int:
        """How many times an engine ran the case."""
        return sum(sighting.ran for sighting in self.sightings)

    @property
    def usual(self) -> Sighting:
        """The result of more than half of the looks; else unknown."""
        for sighting in self.sightings:
            if 2 * sum(other.kind == sighting.kind for other in self.sightings) > len(self.sightings):
                return sighting
        kinds = sorted({brief(sighting) for sighting in self.sightings})
        return Sighting(status="unknown", why=f"{len(self.sightings)} looks did not agree: {'; '.join(kinds)}")


class Fault(Struct, frozen=True, kw_only=True):
    """The divergence that is looked for: by its rule, and where, unless that is of no importance (`place` "")."""

    rule: str
    place: str = ""

    def shows(self, sighting: Sighting) -> bool:
        """Whether a look shows it. A fault whose rule is that the worker survives shows in an `unknown`."""
        return sighting.status != "equal" and sighting.rule == self.rule and self.place in ("", sighting.place)


def is_settled(sightings: Sequence[Sighting]) -> bool:
    """Whether no further look is needed. After an unknown result one more look follows, and no other if it says the same."""
    if not sightings:
        return False
    alike = len({sighting.kind for sighting in sightings}) == 1
    enough = LOOKS if sightings[0].status != "unknown" else 2
    return len(sightings) >= (enough if alike else MAX_LOOKS)


def mark(looked: Looked, fault: Fault) -> tuple[Mark, str]:
    """The mark of a version, and for "skip" why it is neither."""
    sightings = looked.sightings
    shown = sum(fault.shows(sighting) for sighting in sightings)
    equal = sum(sighting.status == "equal" for sighting in sightings)
    if 2 * shown > len(sightings):
        return "bad", ""
    if 2 * equal > len(sightings) and not shown:
        return "good", ""
    if shown:
        return "skip", f"it showed in {shown} of {len(sightings)} looks, and not in the others"
    return "skip", doubt(looked)


def doubt(looked: Looked) -> str:
    """Why a version that does not show what is looked for is not good either."""
    usual = looked.usual
    if usual.status == "diverged":
        return f"it diverged otherwise, by {usual.rule} at {usual.place}, which may hide what is looked for"
    return usual.why or usual.rule


def brief(sighting: Sighting) -> str:
    """A look in a few words."""
    where = f" at {sighting.place}" if sighting.place else ""
    return f"{sighting.status} {sighting.rule}{where}".strip()


class Unclear(Exception):
    """The two ends do not say which divergence is looked for; the message says why."""


def end_mark(looked: Looked, rule: str) -> Mark:
    """The mark of a version as long as it is not known where the fault shows. rule: "" if any may be it."""
    usual = looked.usual
    if usual.status == "equal":
        return "good"
    return "bad" if (usual.rule == rule if rule else usual.status == "diverged") else "skip"


def fault_of(old: Looked, new: Looked, *, anywhere: bool) -> Fault | None:
    """The fault that one of two ends shows and the other does not; neither is "skip" by end_mark. None: neither shows any.

    anywhere  count it wherever the rule is broken. Raises Unclear.
    """
    found = [looked.usual for looked in (old, new) if looked.usual.status != "equal"]
    faults = {Fault(rule=sighting.rule, place="" if anywhere else sighting.place) for sighting in found}
    if len(faults) > 1:
        ends = "; ".join(f"{looked.version} {brief(looked.usual)}" for looked in (old, new))
        raise Unclear(f"both ends diverge, and not alike: {ends}")
    return next(iter(faults), None)


STATE, LOG = "bisect.json", "bisect.log"


class Subject(Struct, frozen=True, kw_only=True):
    """What is run on every version, and how; the versions are not `run.release`, but the bisection's."""

    case: Case
    run: RunSpec = DEFAULT_RUN


class BisectionPlan(Struct, frozen=True, kw_only=True):
    """What makes two bisections the same one; by default, one that is run here and now.

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
    eagletwin: str = __version__
    torch: str = field(default_factory=lambda: installed_version("torch"))


class BisectionState(Struct, kw_only=True):
    """What is known of a bisection. seconds: that it took until now."""

    plan: BisectionPlan
    looked: dict[str, Looked] = {}
    seconds: float = 0.0
    finished: bool = False


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

    def tell(self, text: str) -> None:
        log_line(self.folder, text)


def log_line(folder: Path, text: str) -> None:
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
        if (folder / STATE).is_file() and (lock := _lock_folder(folder)) is not None:
            state = _taken_up(folder, plan)
            if state is not None:
                return BisectionFolder(folder, state, lock)
            lock.close()
    folder = new_run_folder(parent, name)
    run = BisectionFolder(folder, BisectionState(plan=plan), _lock_folder(folder))
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
    return state


def _lock_folder(folder: Path) -> TextIO | None:
    """A lock on the folder, held until it is closed; None: another process has it."""
    file = (folder / ".lock").open("a", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file
