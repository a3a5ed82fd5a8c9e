"""Figures of a search: what its cases had, what came of them, and summary.json, which a program reads."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec import Struct

from eagletwin.harness.core.case import Case
from eagletwin.harness.core.differs import Changes
from eagletwin.harness.core.run_spec import Mode
from eagletwin.harness.core.signature import Signature

from ..page_facts import read_facts
from .coverage import not_looked_at, topics_of
from .looking import CaseSeen, Unstarted

# Cases that a search must have run to say that it found nothing, as pytest does (`--eagletwin-min-cases`).
LEAST = 10
MOST_UNDECIDED = 0.1  # of its cases, the share that the reference may not have decided, and the share with a gap


@dataclass(slots=True)
class KnownBug:
    """A bug of the ledger, as a search met it. id: joined ids, if one case shows several bugs.

    cases    that showed it, and nothing else; shows: what they showed; example: the first of them
    mended   cases that could have shown it, but ran with its remedy
    """

    id: str
    cases: int = 0
    mended: int = 0
    shows: Counter[str] = field(default_factory=Counter)
    example: Case | None = None


@dataclass(slots=True)
class Tally:
    """Figures of a search so far. topics: what its cases had, of unsearched.TOPICS; refused: why engines would not start, by
    what they were to run; impossible: cases with a request that asks for what cannot be; excused: differences that were no
    divergences, by the kind of the Excuse; gaps: cases with a gap; reached: cases that ran the change; tried: cases that were
    run again to tell what they show, and tries: those runs; deaths: workers that ended before their time, and were replaced;
    lost: blocks that were given up, and why."""

    cases: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    exercised: Counter[str] = field(default_factory=Counter)
    accept_lens: Counter[str] = field(default_factory=Counter)
    configurations: Counter[str] = field(default_factory=Counter)
    topics: Counter[str] = field(default_factory=Counter)
    choices: int = 0
    ties: int = 0
    relaxed: int = 0
    impossible: int = 0
    excused: Counter[str] = field(default_factory=Counter)
    gaps: int = 0
    reached: int = 0
    undecided: int = 0
    headroom: float = 0.0
    fallbacks: Counter[str] = field(default_factory=Counter)
    changes: Changes = field(default_factory=Changes)
    known: dict[str, KnownBug] = field(default_factory=dict)
    refused: dict[str, Unstarted] = field(default_factory=dict)
    tried: int = 0
    tries: int = 0
    deaths: int = 0
    lost: list[str] = field(default_factory=list)
    models: set[str] = field(default_factory=set)

    def add(self, seen: CaseSeen) -> None:
        verdict, case = seen.verdict, seen.case
        self.cases += 1
        self.statuses["known" if seen.known else verdict.status] += 1
        self.undecided += verdict.undecided
        self.exercised.update(verdict.exercised)
        self.choices, self.ties = self.choices + verdict.choices, self.ties + verdict.ties
        self.relaxed += verdict.relaxed
        self.impossible += bool(verdict.impossible)
        self.excused.update(verdict.excused)
        self.gaps += verdict.status == "unknown" and bool(verdict.gap)
        self.headroom = max(self.headroom, verdict.headroom)
        self.fallbacks.update(seen.fallbacks)
        self.changes.add(seen.differs)
        self.reached += seen.differs is not None and seen.differs.reached
        self.tried, self.tries = self.tried + bool(seen.tries), self.tries + seen.tries
        self.topics.update(topics_of(case))
        nodes = f" with {case.verify_nodes} nodes" * (case.topk > 1)
        sizes = f"num_steps {case.num_steps}, topk {case.topk}{nodes}, page_size {case.page_size}"
        self.configurations[f"{case.model}, {sizes}"] += 1
        self.models.add(case.model)
        self.accept_lens.update(f"{length} of {case.num_steps + 1}" for length in seen.lengths)
        if seen.known:
            self._show(" and ".join(seen.known), seen.shown, case)
        else:
            for name in seen.could_show:
                self.bug(name).mended += 1

    def explain(self, seen: CaseSeen, bug: str) -> None:
        """A case that was counted shows this known bug."""
        self.statuses[seen.verdict.status] -= 1
        self.statuses["known"] += 1
        self._show(bug, seen.signature, seen.case)

    def bug(self, name: str) -> KnownBug:
        return self.known.setdefault(name, KnownBug(name))

    def _show(self, name: str, shown: Signature | None, case: Case) -> None:
        bug = self.bug(name)
        bug.cases += 1
        bug.shows[str(shown)] += 1
        bug.example = bug.example or case

    def left_out(self, mode: Mode) -> list[str]:
        """What neither these cases nor the mode had, each with the option for it."""
        return not_looked_at(self.topics, self.models, mode)

    def refuse(self, refused: Unstarted) -> None:
        """An engine that would not start: one of each reason is kept."""
        self.refused.setdefault(f"{refused.probe.model}: {refused.why}", refused)


# summary.json, of which the document of a search is made.

SUMMARY = "summary.json"


class FindingFacts(Struct, kw_only=True):
    """A finding. cases, seconds: until it was found; shrink_looks, shrink_seconds: until it was smallest.

    known    the ledger's bug that the smallest case may be; apart: why it is not, or that the base shows the same
    changes  the options that the case runs with; place: the first wrong number; ran: changed functions that it called
    """

    signature: Signature
    status: str
    folder: str
    cases: int
    seconds: float
    shrink_looks: int
    shrink_seconds: float
    partial: bool = False
    known: str = ""
    apart: str = ""
    changes: list[str] = []
    place: str = ""
    ran: list[str] = []
    case: dict[str, Any] = {}

    @property
    def name(self) -> str:
        """Of its folder, in which the smallest case has one."""
        return Path(self.folder).parent.name

    @property
    def title(self) -> str:
        return f"{self.status}: {self.signature}{f' (it may be {self.known})' if self.known else ''}"


class UnconfirmedFacts(Struct, kw_only=True):
    """A finding that was still being made smaller when the search ended."""

    signature: Signature
    status: str
    folder: str
    cases: int
    shrink_looks: int


class AsideFacts(Struct, kw_only=True):
    """What was seen and not looked into: run once, and not confirmed. Cases that show what was found before, or what a smaller
    case showed in place of what was being shrunk; and cases that the reference cannot decide.

    example  file of the first such case; cases: how many there were
    """

    signature: Signature
    cases: int
    example: str
    undecided: bool = False


class KnownFacts(Struct, kw_only=True):
    """A bug of the ledger. mended: cases that may show it, and ran with its remedy; shows: what the `cases` showed"""

    id: str
    cases: int
    mended: int
    shows: dict[str, int] = {}
    example: str = ""


class EffectFacts(Struct, kw_only=True):
    """The smallest case in which a right change alters a recorded value.

    case     its file, beside which the traces lie; sizes: how large it is
    place    of the first value that differs; base, tree: the two values
    on_base  the base's verdict on it, or the first wrong value there
    runs     smaller cases that were tried; partial: time was up
    paste    files beside it that hold the case as a test
    """

    case: str
    sizes: str
    place: str
    base: str
    tree: str
    on_base: str
    runs: int
    partial: bool = False
    paste: tuple[str, ...] = ()


class Summary(Struct, kw_only=True):
    """The result of a search.

    headline, remarks, meaning  how it is summed up, in sentences, and what its exit code means; not_seen: what did not run
    command     searches like this again; resume: continues it, where it was ended
    effect      where a search found nothing and was to explain what the change does
    known_note  why bugs are known that this mode cannot reach; refused: why engines did not start, by model and reason
    """

    seconds: float
    tally: Tally
    headline: str = ""
    remarks: list[str] = []
    not_seen: str = ""
    command: str = ""
    resume: str = ""
    exit_code: int | None = None
    meaning: str = ""
    not_looked_at: list[str] = []
    refused: dict[str, str] = {}
    known: list[KnownFacts] = []
    known_note: str = ""
    findings: list[FindingFacts] = []
    unconfirmed: list[UnconfirmedFacts] = []
    set_aside: list[AsideFacts] = []
    effect: EffectFacts | None = None


def read_summary(folder: Path) -> Summary:
    """Raises InputError for a summary that cannot be read."""
    return read_facts(folder / SUMMARY, Summary, "the folder of a search of this eagletwin")
