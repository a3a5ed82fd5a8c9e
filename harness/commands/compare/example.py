"""The one case of a breakage that a person reads: made small as a finding of `fuzz` is, still right on BASE."""

from dataclasses import dataclass
from pathlib import Path

from eagletwin.harness.core.case import Case

from ..fuzz.shrinking import size
from .groups import Answered, Breakage

MINIMAL = "minimal"  # in the folder of the first case that was broken so: the run folder of the smallest


@dataclass(frozen=True, slots=True)
class Example:
    """The smallest case of a breakage.

    changes  the options that it runs with: remedies of known bugs, which would come first
    found    the case that it was made from; the same if it is no smaller
    looks    runs that it took to make it small; partial: time was up before it was smallest
    """

    case: Case
    line: str
    again: str
    folder: Path | None
    known: str = ""
    changes: tuple[str, ...] = ()
    found: Case | None = None
    looks: int = 0
    partial: bool = False


def example_of(broken: Breakage) -> Example:
    """The smallest of the cases as they were found, if none was made smaller; the one with a run folder, of equals."""
    answer: Answered = min(broken.answers, key=lambda one: (one.folder is None, size(one.question.case)))
    question = answer.question
    return Example(question.case, answer.head.text, answer.again, answer.folder, answer.known, question.changes)
