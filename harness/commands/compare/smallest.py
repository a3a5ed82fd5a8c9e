"""Makes one case of a breakage smaller: still equal on BASE, and still broken on HEAD in the same way.

Hypothesis shrinks it, from the list that it was drawn for. The case of a ledger entry is small already, and stays as it is.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path

from eagletwin.harness.check.trials import Trial, Trials
from eagletwin.harness.core.case import Case, encode_case
from eagletwin.harness.core.signature import Signature
from eagletwin.harness.engines.host import WouldNotStart

from .groups import Answered
from .questions import Question

MINIMAL = "minimal"  # in the folder of the first case that was broken so: the run folder of the smallest


@dataclass(frozen=True, slots=True)
class Example:
    """The one case of a breakage that a person reads.

    found    the case that it was made from; the same if it is no smaller
    looks    runs that it took to make it small; partial: time was up before it was smallest
    """

    case: Case
    line: str
    again: str
    folder: Path | None
    known: str = ""
    found: Case | None = None
    looks: int = 0
    partial: bool = False


def example_of(answer: Answered) -> Example:
    """A case as it was found."""
    return Example(answer.question.case, answer.head.text, answer.again, answer.folder, answer.known)


def size(case: Case) -> int:
    return len(encode_case(case))


class _TimeIsUp(BaseException):
    """Leaves Hypothesis. Not an Exception, so that it is not taken for a case that shows it."""


@dataclass(slots=True)
class Smaller:
    """The search for a smaller case.

    base, head  the trials of each side; until: when to stop
    smallest    the smallest so far; looks: cases that it took; partial: time was up before it was smallest
    """

    base: Trials
    head: Trials
    signature: Signature
    question: Question
    until: float
    looks: int = 0
    partial: bool = False
    smallest: Case = field(init=False)

    def __post_init__(self) -> None:
        self.smallest = self.question.case

    def shrink(self) -> None:
        if self.question.drawing is None:
            return
        try:
            self.question.drawing.shrink(self.question.case, self._shows)
        except _TimeIsUp:
            self.partial = True

    def _shows(self, case: Case) -> bool:
        known = self.head.known(case)
        if known is None:
            if time.monotonic() >= self.until:
                raise _TimeIsUp
            self.looks += 1
        try:
            if self._seen(self.head, case) != self.signature or self._seen(self.base, case) is not None:
                return False
        except WouldNotStart:
            return False
        if size(case) < size(self.smallest):
            self.smallest = case
        return True

    def _seen(self, trials: Trials, case: Case) -> Signature | None:
        trial: Trial = trials.look(case)
        return None if trial.unrun else trial.signature
