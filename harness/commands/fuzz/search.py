"""Generate cases until one shows something that no known bug explains, shrink it to one that a person can hold in the head, and
keep all of it.

Hypothesis draws the cases (cases/blocks.py) and shrinks; looking.py runs them, here or in other processes (pool.py);
check/known.py says what is known, and check/confirm.py makes sure.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from eagletwin.cases.blocks import block_of
from eagletwin.cases.entry import Entry
from eagletwin.cases.profiles import draw_from_seeds_alone
from eagletwin.cases.regressions import LEDGER
from eagletwin.harness.check.known import Mends, may_be
from eagletwin.harness.check.trials import Trials
from eagletwin.harness.core.case import Case, pretty_case
from eagletwin.harness.core.progress import Line
from eagletwin.harness.core.signature import Signature
from eagletwin.harness.core.words import count

from .looking import NO_BLOCK, CaseSeen, Looking, Unstarted
from .plan import Plan
from .shrinking import Finding, Shrinking, Teller
from .tally import LEAST, MOST_UNDECIDED, Tally

_NEWS = 5.0  # seconds between two lines of progress


@dataclass(slots=True)
class Aside:
    """What a search saw and did not look into: cases that show what was found before, or what a smaller case showed in place of
    what was being shrunk; and cases that the reference cannot decide. Run once, and not confirmed.

    example  file of the first such case; cases: how many there were
    """

    signature: Signature
    example: Path
    cases: int = 0
    undecided: bool = False


class Blocks(Protocol):
    """Who runs the blocks of a search."""

    def blocks(self) -> Iterator[Iterator[CaseSeen | Unstarted]]:
        """One block after the other in the order of their numbers, with what is seen in each as it comes."""
        ...

    def rest(self) -> None:
        """Nothing more is wanted for now."""
        ...


@dataclass(slots=True)
class Here:
    """Runs the blocks in this process."""

    mends: Mends
    plan: Plan

    def blocks(self) -> Iterator[Iterator[CaseSeen | Unstarted]]:
        looking, number = Looking(self.mends, self.plan), 0
        while True:
            yield looking.block(number)
            number += 1

    def rest(self) -> None:
        pass


@dataclass(slots=True)
class Fuzz:
    """One search. `search` yields findings as they come; `tally` is up to date at any time.

    found   folders of findings, with the one that is still being shrunk; known: what was found, set aside from then on
    """

    trials: Trials
    folder: Path
    plan: Plan
    progress: Callable[[str], None] = lambda text: None
    pool: Blocks | None = None
    line: Line = field(default_factory=Line)
    tally: Tally = field(default_factory=Tally)
    found: list[Path] = field(default_factory=list)
    known: set[Signature] = field(default_factory=set)
    asides: dict[Signature, Aside] = field(default_factory=dict)
    shrinking: Shrinking | None = None
    _begun: float = 0.0
    _told_at: float = 0.0
    _mends: Mends | None = None

    def __post_init__(self) -> None:
        draw_from_seeds_alone()
        self._begun = self._told_at = time.monotonic()
        self._mends = Mends(self.trials.host, self.trials.run)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun

    @property
    def mends(self) -> Mends:
        assert self._mends is not None
        return self._mends

    def search(self) -> Iterator[Finding]:
        """Draw cases until time or number is up. Of several cases with one signature the first alone is yielded."""
        pool = self.pool or Here(self.mends, self.plan)
        for block in pool.blocks():
            for seen in block:
                finding = self._take(seen, pool)
                if finding is not None:
                    yield finding
                if self._enough():
                    return
            self._tell()

    def _take(self, seen: CaseSeen | Unstarted, pool: Blocks) -> Finding | None:
        """Count what was seen; the finding, if it is new."""
        if isinstance(seen, Unstarted):
            self.tally.refuse(seen)
            return None
        self.tally.add(seen)
        self.line.done(f"{seen.case.model}, num_steps {seen.case.num_steps}, topk {seen.case.topk}")
        if seen.known or seen.signature is None:
            return None
        if seen.verdict.undecided or seen.signature in self.known:
            self.set_aside(seen.case, seen.signature, seen.verdict.undecided)
            return None
        pool.rest()
        left = self._unknown(seen)
        return None if left is None else self._shrink(left)

    def _unknown(self, seen: CaseSeen) -> CaseSeen | None:
        """The case, unless a bug is behind it that such a case was not thought to show."""
        trials = self._trials(seen)
        if seen.verdict.status != "diverged" or trials.look_alone(seen.case).signature != seen.signature:
            return seen  # what does not show alone is gone with any remedy
        bug = may_be(trials.host, seen.case, seen.verdict.rule, trials.run) if not seen.cured else ""
        if not bug:
            return seen
        if self.mends.right_in_base(seen.case, self._mended(seen), seen.view):
            return replace(seen, cured=(bug,))
        self.tally.explain(seen, bug)
        return None

    def _trials(self, seen: CaseSeen) -> Trials:
        return self.mends.trials(self._mended(seen), seen.view)

    @property
    def _called(self) -> str:
        return "" if self.mends.base is None else self.mends.base.called

    def _apart(self, seen: CaseSeen) -> str:
        """Why what was found is no known bug, though remedies mend it; empty if none does."""
        if not seen.cured:
            return ""
        names = " and ".join(seen.cured)
        return f"With the remedy of {names} it is equal, too, but {self._called} is right in this case, so the change is wrong."

    @staticmethod
    def _mended(seen: CaseSeen) -> tuple[Entry, ...]:
        return tuple(LEDGER[name] for name in seen.mended)

    def _shrink(self, seen: CaseSeen) -> Finding | None:
        assert seen.signature is not None
        cases, seconds = self.tally.cases, self.seconds
        shrinking = self.shrinking = Shrinking(
            seen,
            self._trials(seen),
            self.folder / f"finding-{len(self.found) + 1}",
            seconds=self.plan.shrink_seconds,
            seed=self.plan.seed,
            command=self.plan.command,
            teller=Teller(aside=self.set_aside, news=self.progress, look=self.line.look),
        )
        self.found.append(shrinking.folder)
        past = f", past {', '.join(seen.mended)}" if seen.mended else ""
        past += f", which {self._called} does not show" if seen.cured else ""
        self.progress(f"case {cases}, {seconds:.1f} s: {seen.verdict.status} {seen.signature}{past}; shrinking")
        shrinking.shrink(
            None if seen.block == NO_BLOCK else block_of(self.plan.seed, seen.block, self.plan.asked),
            (lambda case: self.mends.right_in_base(case, self._mended(seen), seen.view)) if seen.cured else None,
        )
        finding, self.shrinking = shrinking.conclude(cases, seconds, self._apart(seen)), None
        self.known |= {seen.signature, finding.signature}
        return finding

    @property
    def looked_enough(self) -> bool:
        """Whether a search that found nothing says something: one case was equal, as many ran as were asked for, or LEAST, no
        more than MOST_UNDECIDED of them were left undecided, and what would not start is not to start."""
        tally = self.tally
        ran_enough = bool(tally.statuses["equal"]) and tally.cases >= min(LEAST, self.plan.max_cases)
        return ran_enough and tally.undecided <= MOST_UNDECIDED * tally.cases and not self.unstarted

    @property
    def unstarted(self) -> list[Unstarted]:
        """Engines that would not start, where nothing says that the SGLang does not have what they were to run: of a tree, or
        with a change in memory, that may be the fault that is searched for."""
        source = self.trials.host.source
        whole = not source.tree and not self.trials.run.patches
        return [] if whole else [one for one in self.tally.refused.values() if not one.ours]

    def _enough(self) -> bool:
        return self.seconds >= self.plan.seconds or self.tally.cases >= self.plan.max_cases

    def keep_elsewhere(self, folder: Path) -> None:
        """Where the run folder cannot be written: put what was still being shrunk into another one."""
        if self.shrinking is not None:
            self.shrinking.keep_in(folder)

    def set_aside(self, case: Case, signature: Signature, undecided: bool) -> None:
        """Count what a case shows, and keep the first case that does."""
        aside = self.asides.get(signature)
        if aside is None:
            file = self.folder / "set-aside" / f"{len(self.asides) + 1}-{signature.slug}.json"
            file.parent.mkdir(exist_ok=True)
            file.write_text(pretty_case(case), encoding="utf-8")
            aside = self.asides[signature] = Aside(signature, file, undecided=undecided)
        aside.cases += 1

    def _tell(self) -> None:
        if time.monotonic() < self._told_at + _NEWS:
            return
        self._told_at, tally = time.monotonic(), self.tally
        known = sum(bug.cases for bug in tally.known.values())
        aside = sum(one.cases for one in self.asides.values() if one.signature in self.known)
        more = f", {known} with known bugs" if known else ""
        more += f", {aside} with what was found already" if aside else ""
        self.progress(
            f"{count(tally.cases, 'case')} in {self.seconds:.0f} s, {tally.cases / max(self.seconds, 0.1):.1f}/s{more}"
        )
