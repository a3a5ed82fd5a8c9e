"""Two verdicts of one case, sorted into a group, and all groups summed up in one result. Nothing here runs anything."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from eagletwin.cases.blocks import Block
from eagletwin.cases.entry import Entry
from eagletwin.cases.ledger import ledger_of
from eagletwin.cases.reach import why_unreachable
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.errors import EXIT_DIVERGED, EXIT_EQUAL, EXIT_UNKNOWN
from eagletwin.harness.core.records import Header, accept_lengths
from eagletwin.harness.core.run_spec import DEFAULT_ENGINE, Engine, Mode, RunSpec
from eagletwin.harness.core.signature import Signature, without_numbers
from eagletwin.harness.core.terminal import count
from eagletwin.harness.core.verdict import DECLARED_VIEW, View

from ..fuzz.shrinking import size, sizes
from ..options import nothing_run
from ..result import AcceptedFacts, ExampleFacts

Status = Literal["equal", "broken", "unknown"]
# `otherwise`: wrong on both sides, and first in another way; `unknown`: on one side or both.
Group = Literal["newly broken", "newly fixed", "still diverged", "diverged otherwise", "unknown", "as before"]
GROUPS: tuple[Group, ...] = (
    "newly broken",
    "newly fixed",
    "still diverged",
    "diverged otherwise",
    "unknown",
    "as before",
)
MINIMAL = "minimal"  # in the folder of the first case that was broken so: the run folder of the smallest


@dataclass(frozen=True, slots=True)
class SharedCase:
    """A case that both sides run, how it is judged, and the entry that it belongs to; None: it was generated.

    mended  entries whose remedies both sides run it with; block: of a generated case, the one that draws it
    """

    name: str
    case: Case
    view: View = DECLARED_VIEW
    entry: Entry | None = None
    mended: tuple[Entry, ...] = ()
    block: Block | None = None

    @property
    def changes(self) -> tuple[str, ...]:
        """The options for these remedies."""
        return tuple(word for entry in self.mended for word in ("--remedy", entry.id))

    @property
    def shape(self) -> str:
        return "tree" if self.case.topk > 1 else "chain"


def select_entries(names: Sequence[str], engine: Engine = DEFAULT_ENGINE) -> list[Entry]:
    """The entries that `--ledger` names: none, all, or by their ids. Raises InputError."""
    if "none" not in names:
        return ledger_of(list(names), engine)
    if len(set(names)) > 1:
        raise nothing_run("--ledger none, and other entries as well", "leave out either")
    return []


def cases_of_ledger(entries: Sequence[Entry], mode: Mode) -> list[SharedCase]:
    """The entries that the mode reaches, each once, in the view in which the entry's bug is a divergence."""
    once = {entry.id: entry for entry in entries if not why_unreachable(entry, mode)}
    return [SharedCase(entry.id, entry.case, entry.red.view, entry) for entry in once.values()]


@dataclass(frozen=True, slots=True)
class SideResult:
    """What one side made of a case.

    status     broken: diverged, or the worker did not survive
    line       what is wrong, or why nothing can be said, on one line
    signature  of what is wrong
    """

    status: Status
    line: str = ""
    signature: Signature | None = None

    @property
    def text(self) -> str:
        return self.status if self.status == "equal" else self.line or self.status

    @property
    def rule(self) -> str:
        return self.signature.rule if self.signature is not None else ""


EQUAL = SideResult("equal")


def group_of(base: SideResult, head: SideResult) -> Group:
    """What the change does to a case. What is unknown on a side is never counted as kept, broken or fixed."""
    if "unknown" in (base.status, head.status):
        return "unknown"
    if base.status == head.status == "equal":
        return "as before"
    if base.status == "equal":
        return "newly broken"
    if head.status == "equal":
        return "newly fixed"
    return "still diverged" if base.signature == head.signature else "diverged otherwise"


@dataclass(frozen=True, slots=True)
class ComparedCase:
    """A question with the answers of both sides.

    known   the ledger's bug that explains it; "" if none is known
    again   the command that shows it again; "" where there is nothing to show
    folder  the run folder of HEAD, of the first case that is newly broken in its way
    ran     of what is newly broken: the changed functions that HEAD called
    reached whether it ran something of the change on either side; None: what changed is not known
    believed  whether BASE did not run, since it has the fix as the newest release has it
    """

    question: SharedCase
    base: SideResult
    head: SideResult
    known: str = ""
    again: str = ""
    folder: Path | None = None
    ran: tuple[str, ...] = ()
    reached: bool | None = None
    believed: bool = False

    @property
    def group(self) -> Group:
        return group_of(self.base, self.head)

    @property
    def undecided(self) -> bool:
        """Whether it keeps the result open: HEAD may be wrong there, and BASE does not say whether it was before.

        What neither side can be told of, for the same reason, is no work of the change; what is right on HEAD is not broken.
        """
        if self.group == "diverged otherwise":
            return True
        if self.group != "unknown" or self.head.status == "equal":
            return False
        return not (self.base.status == self.head.status and without_numbers(self.base.line) == without_numbers(self.head.line))


@dataclass(frozen=True, slots=True)
class Breakage:
    """Cases that HEAD breaks in one way: by the same rule, at the same stage and layer, or by the same exception in the same
    function. One bug shows in many cases, and a person reads it once."""

    signature: Signature
    answers: tuple[ComparedCase, ...]

    @property
    def first(self) -> ComparedCase:
        """The case that was run most often: three times alone."""
        return next((answer for answer in self.answers if answer.folder is not None), self.answers[0])

    @property
    def names(self) -> list[str]:
        return [answer.question.name for answer in self.answers]

    @property
    def ran(self) -> list[str]:
        """Changed functions that HEAD called in each of the cases."""
        return [name for name in self.answers[0].ran if all(name in answer.ran for answer in self.answers)]


def breakages(answers: Sequence[ComparedCase]) -> list[Breakage]:
    """What is newly broken, each way once, in the order in which it was found."""
    found: dict[Signature, list[ComparedCase]] = {}
    for answer in answers:
        if answer.group == "newly broken":
            found.setdefault(answer.head.signature or Signature(), []).append(answer)
    return [Breakage(signature, tuple(of)) for signature, of in found.items()]


@dataclass(frozen=True, slots=True)
class Result:
    """What all answers say together.

    doubts  why they say nothing about the change; none if some of what changed ran
    failed  why nothing ran
    least   as many cases must have run the change, if it is known what changed
    """

    answers: Sequence[ComparedCase]
    doubts: Sequence[str] = ()
    failed: str = ""
    least: int = 0

    def of(self, group: Group) -> list[ComparedCase]:
        return [answer for answer in self.answers if answer.group == group]

    @property
    def told(self) -> bool:
        """Whether anything was compared."""
        return any(answer.group != "unknown" for answer in self.answers)

    @property
    def reached(self) -> int | None:
        """How many cases ran something of the change; None: what changed is not known."""
        each = [answer.reached for answer in self.answers if answer.reached is not None]
        return sum(each) if each else None

    @property
    def compared(self) -> str:
        """How many cases were compared, and how many of them ran the change: a part of a sentence."""
        number = count(len(self.answers), "case")
        if self.reached is None:
            return f"{number} {'was' if len(self.answers) == 1 else 'were'} compared"
        return f"{self.reached} of {number} ran the change"

    @property
    def exit_code(self) -> int:
        if self.of("newly broken"):
            return EXIT_DIVERGED
        return EXIT_UNKNOWN if self.open else EXIT_EQUAL

    @property
    def open(self) -> str:
        """Why the result is open, in a sentence without its end; "" if it is not, or something is newly broken."""
        if self.of("newly broken"):
            return ""
        if self.failed:
            return self.failed
        if not self.told:
            return "no case ran to a verdict on both sides"
        if self.doubts:
            return "none of the changed functions ran, so nothing is said of the change"
        if self.reached is not None and self.reached < self.least:
            return f"{self.compared}, and fewer than {self.least} say too little of it"
        undecided = [answer for answer in self.answers if answer.undecided]
        otherwise = sum(answer.group == "diverged otherwise" for answer in undecided)
        parts = [f"{count(otherwise, 'case')} diverged on both sides, and not in the same way"] if otherwise else []
        left = len(undecided) - otherwise
        parts += [f"{count(left, 'case')} could not be told on HEAD, or on BASE where HEAD is wrong"] if left else []
        return "; ".join(parts)

    @property
    def word(self) -> str:
        """How the result is called."""
        broken = breakages(self.answers)
        if broken:
            return f"{len(broken)} NEWLY BROKEN"
        return "CANNOT TELL" if self.open else "NONE NEWLY WRONG"

    @property
    def sentence(self) -> str:
        """The result in one sentence."""
        numbers = ", ".join(f"{len(self.of(group))} {group}" for group in GROUPS if self.of(group))
        broken = breakages(self.answers)
        if broken:
            each = ", ".join(f"{one.signature} in {count(len(one.answers), 'case')}" for one in broken[:3])
            more = f" and in {count(len(broken) - 3, 'more way')}" if len(broken) > 3 else ""
            return f"HEAD is wrong where BASE is right: {each}{more}. {self.compared}: {numbers}."
        if self.open:
            return f"Cannot tell: {self.open}{f' ({numbers})' if numbers else ''}."
        return f"{self.compared}; none is newly wrong: {numbers}."


def count_rounds(found: dict[tuple[str, str], AcceptedFacts], shared: SharedCase, base: Header, head: tuple[int, int]) -> None:
    """Add a generated case, unless a side did not finish it. head: rounds and tokens of HEAD; none if it did not."""
    if base.ending.kind != "finished" or not head[0]:
        return
    lengths = accept_lengths(base.records)
    key = shared.case.model, shared.shape
    found.setdefault(key, AcceptedFacts(*key)).add((len(lengths), sum(lengths)), head)


def example_facts(
    broken: Breakage, case: Case, run: RunSpec, *, line: str, changes: tuple[str, ...], **more: Any
) -> ExampleFacts:
    """A case to read of a breakage. changes: the options that it runs with: remedies of known bugs, which would come first."""
    portable = replace(run, release="HEAD", view=broken.first.question.view, changes=changes).command("check", "case.json")
    facts = {"case": msgspec.to_builtins(case), "changes": list(changes), "size": sizes(case), "portable": portable}
    return ExampleFacts(line=line, **facts, **more)


def example_of(broken: Breakage, run: RunSpec) -> ExampleFacts:
    """The smallest of the cases as they were found, if none was made smaller; the one with a run folder, of equals."""
    answer: ComparedCase = min(broken.answers, key=lambda one: (one.folder is None, size(one.question.case)))
    question, folder = answer.question, str(answer.folder or "")
    more: dict[str, Any] = {"line": answer.head.text, "changes": question.changes, "known": answer.known}
    return example_facts(broken, question.case, run, again=answer.again, folder=folder, **more)
