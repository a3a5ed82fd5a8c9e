"""Generate cases until one shows something that no known bug explains, shrink it to one that a person can hold in the head, and
keep all of it.

Hypothesis draws the cases (cases/blocks.py) and shrinks; looking.py runs them, here or by workers (pool.py); check/known.py
says what is known, and check/confirm.py makes sure. journal.py keeps what a search that was ended needs to continue.
"""

import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from eagletwin.cases.blocks import block_of
from eagletwin.cases.entry import Entry
from eagletwin.cases.sample_cases import draw_from_seeds_alone
from eagletwin.harness.check.known import KnownBugMatcher, entries_of, entry_of_case, may_be, remedies_of
from eagletwin.harness.check.trials import Trials
from eagletwin.harness.core.case import Case, pretty_case
from eagletwin.harness.core.signature import Signature
from eagletwin.harness.core.terminal import Line, count

from .corpus import Corpus
from .coverage import UNMEASURED, Measured
from .effect import Effect
from .journal import Conclusion, Journal, Past, SetAside
from .looking import NO_BLOCK, CaseSeen, Unstarted
from .options import Plan
from .pool import BlockPool
from .shrinking import Finding, ShrinkCallbacks, Shrinking
from .steering import executed_places
from .tally import LEAST, MOST_UNDECIDED, AsideFacts, EffectFacts, Tally

# Engines that would not start, after which a search that has run no case yet ends: another one would not start either.
_IN_VAIN = 100
_NEWS = 5.0  # seconds between two lines of progress
_COMPARED, _COMPARING = 40, 0.1  # cases that are run without the change, too, and the share of the search's time for them
_ALIKE = 2  # of one configuration, whose engine takes longer than both, before those of another one


@dataclass(slots=True)
class Triage:
    """The inquiry into a case that shows something new: whether a bug is behind it that such a case was not thought to show;
    then it is made small. seen: after `bug`, with the entries that make it equal though it is new."""

    matcher: KnownBugMatcher
    plan: Plan
    seen: CaseSeen

    def bug(self) -> str:
        """The id of the known bug that is behind it; empty: it is new."""
        seen, trials = self.seen, self.matcher.trials(self._workaround_entries, self.seen.view)
        if seen.verdict.status != "diverged" or trials.look_alone(seen.case).signature != seen.signature:
            return ""  # what does not show alone is gone with any remedy
        bug = may_be(trials.host, seen.case, seen.verdict.rule, trials.run) if not seen.cured else ""
        if bug and self.matcher.right_in_base(seen.case, self._workaround_entries, seen.view):
            self.seen = replace(seen, cured=(bug,))
            return ""
        return bug

    def begin(self, folder: Path, teller: ShrinkCallbacks) -> Shrinking:
        """The shrinking, which has the case as it was found on disk."""
        plan = self.plan
        shutil.rmtree(folder, ignore_errors=True)  # of a driver that was ended while it shrank this
        return Shrinking(
            self.seen, self.matcher, folder, seconds=plan.shrink_seconds, seed=plan.seed, command=plan.command, teller=teller
        )

    def finish(self, shrinking: Shrinking, cases: int, seconds: float) -> Finding:
        """Make it small, and confirm it. cases, seconds: until it was found."""
        seen, plan = self.seen, self.plan
        shrinking.shrink(
            None if seen.block == NO_BLOCK else block_of(plan.seed, seen.block, plan.asked),
            (lambda case: self.matcher.right_in_base(case, self._workaround_entries, seen.view)) if seen.cured else None,
        )
        return shrinking.conclude(cases, seconds, self._apart)

    @property
    def past(self) -> str:
        """Why it is no known bug, where a remedy makes it equal: a part of a sentence."""
        return f", which {self._base_name} does not show" if self.seen.cured else ""

    @property
    def _workaround_entries(self) -> tuple[Entry, ...]:
        return entries_of(self.seen.mended)

    @property
    def _base_name(self) -> str:
        return "" if self.matcher.base is None else self.matcher.base.called

    @property
    def _apart(self) -> str:
        """Why what was found is no known bug, though remedies mend it; empty if none does."""
        if not self.seen.cured:
            return ""
        names = " and ".join(self.seen.cured)
        return (
            f"With the remedy of {names} it is equal, too, but {self._base_name} is right in this case, so the change is wrong."
        )


@dataclass(slots=True)
class Fuzz:
    """One search. `search` yields findings as they come; `tally` is up to date at any time.

    pool    who runs the blocks; None: this process alone
    past    what earlier drivers of this search left; journal: where this one leaves it
    measured  which cases run what is changed; corpus: takes those that do
    answer  takes the verdict as soon as there is one: of what is found, before it is made small
    found   folders of findings, with the one that is still being shrunk; known: what was found, set aside from then on
    """

    trials: Trials
    folder: Path
    plan: Plan
    progress: Callable[[str], None] = lambda text: None
    pool: BlockPool | None = None
    line: Line = field(default_factory=Line)
    past: Past | None = None
    journal: Journal | None = None
    measured: Measured = UNMEASURED
    corpus: Corpus | None = None
    tally: Tally = field(default_factory=Tally)
    found: list[Path] = field(default_factory=list)
    known: set[Signature] = field(default_factory=set)
    asides: dict[Signature, AsideFacts] = field(default_factory=dict)
    shrinking: Shrinking | None = None
    effect: EffectFacts | None = None
    answer: Callable[[str], None] = lambda status: None
    _begun: float = 0.0
    _effects: list[CaseSeen] = field(default_factory=list)  # equal cases that ran a changed statement
    _told_at: float = 0.0
    _in_vain: int = 0
    _matcher: KnownBugMatcher | None = None

    def __post_init__(self) -> None:
        draw_from_seeds_alone()
        self._begun = self._told_at = time.monotonic()
        self._matcher = KnownBugMatcher(self.trials.host, self.trials.run)
        if self.past is not None:
            self._begun -= self.past.at
            self.tally.deaths, self.tally.lost = self.past.deaths, list(self.past.lost)
            for one in self.past.concluded:
                if one.finding is not None:
                    self.found.append(self.folder / one.finding.name)
                    self.known |= {one.signature, one.finding.signature}

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun

    @property
    def matcher(self) -> KnownBugMatcher:
        assert self._matcher is not None
        return self._matcher

    def search(self) -> Iterator[Finding]:
        """Draw cases until time or number is up. Of several cases with one signature the first alone is yielded, unless an
        earlier driver found it."""
        pool = self.pool = self.pool or BlockPool(self.matcher, self.plan, measured=self.measured)
        for seen in self._results(pool):
            finding = self._take(seen, pool)
            if not self.found and self.tally.cases >= len(self.plan.first) and self.looked_enough:
                self.answer("equal")
            if finding is not None:
                yield finding

    def _results(self, pool: BlockPool) -> Iterator[CaseSeen | Unstarted]:
        """What comes of the cases until the search has enough. Where the time is up, also what came of later blocks."""
        for block in pool.blocks():
            for seen in block:
                yield seen
                if self._enough(pool):
                    if self.seconds >= self.plan.seconds:
                        yield from pool.early()[: max(0, self.plan.max_cases - self.tally.cases)]
                    return
            self.tell()

    def _take(self, seen: CaseSeen | Unstarted, pool: BlockPool) -> Finding | None:
        """Count what was seen; the finding, if it is new."""
        if isinstance(seen, Unstarted):
            self.tally.refuse(seen)
            self._in_vain += 1
            return None
        if not self.count(seen):
            return None
        if (concluded := self._past_conclusion(seen)) is not None:
            self._repeat(seen, concluded)
            return None
        assert seen.signature is not None
        pool.rest()
        inquiry = Triage(self.matcher, self.plan, seen)
        if bug := inquiry.bug():
            self.tally.explain(seen, bug)
            self._note(Conclusion(seen.case, seen.signature, bug))
            return None
        return self._shrink(inquiry)

    def _past_conclusion(self, seen: CaseSeen) -> Conclusion | None:
        """What an earlier driver concluded of a case."""
        each = () if self.past is None else self.past.concluded
        return next((one for one in each if (one.case, one.signature) == (seen.case, seen.signature)), None)

    def _repeat(self, seen: CaseSeen, concluded: Conclusion) -> None:
        """Count what a case came to by an earlier driver."""
        for aside in concluded.asides:
            self.set_aside(aside.case, aside.signature, aside.undecided)
        if concluded.finding is None:
            self.tally.explain(seen, concluded.bug)

    def _note(self, concluded: Conclusion) -> None:
        if self.journal is not None:
            self.journal.add(concluded)

    def count(self, seen: CaseSeen) -> bool:
        """Count a case; whether it shows something that no known bug explains, and that was not found before."""
        self.tally.add(seen)
        if self.corpus is not None:
            self.corpus.add(seen.case, seen.differs)
        if seen.numbers:
            self._effects.append(seen)
        self.line.done(f"{seen.case.model}, num_steps {seen.case.num_steps}, topk {seen.case.topk}")
        if seen.known or seen.signature is None:
            return False
        if seen.verdict.undecided or (seen.signature in self.known and self._past_conclusion(seen) is None):
            self.set_aside(seen.case, seen.signature, seen.verdict.undecided)
            return False
        return True

    def _shrink(self, inquiry: Triage) -> Finding:
        seen, cases, seconds = inquiry.seen, self.tally.cases, self.seconds
        assert seen.signature is not None
        asides = list[SetAside]()
        self.answer(seen.verdict.status)
        if self.corpus is not None:
            self.corpus.add(seen.case, seen.differs, found=True)

        def aside(case: Case, signature: Signature, undecided: bool) -> None:
            self.set_aside(case, signature, undecided)
            asides.append(SetAside(case, signature, undecided))

        teller = ShrinkCallbacks(aside=aside, news=self.progress, look=self.line.look)
        shrinking = self.shrinking = inquiry.begin(self.folder / f"finding-{len(self.found) + 1}", teller)
        self.found.append(shrinking.folder)
        self.progress(f"case {cases}, {seconds:.1f} s: {seen.verdict.status} {seen.signature}{inquiry.past}; shrinking")
        finding, self.shrinking = inquiry.finish(shrinking, cases, seconds), None
        self.known |= {seen.signature, finding.signature}
        if self.corpus is not None:
            self.corpus.add(finding.outcome.case, finding.outcome.trace.differs, found=True)
        self._note(Conclusion(seen.case, seen.signature, finding=finding.facts, asides=tuple(asides)))
        return finding

    def compare_with_base(self, *, explain: bool = False) -> None:
        """Run cases that ran the change without it: do their numbers differ, and is a live bug gone? All of the ledger's own,
        and others for a tenth of the search's time. explain: for as long as a shrinking may take, until one is wrong without
        it; shrink that one, or the first in which they do."""
        altered: CaseSeen | None = None
        wrong: CaseSeen | None = None
        base, changes = self.matcher.base, self.tally.changes
        until = time.monotonic() + max(self.plan.seconds * _COMPARING, self.plan.shrink_seconds * explain)
        for seen in self._to_compare():
            entry = entry_of_case(seen.case, self.trials.run.mode)
            if base is None or (entry is None and (time.monotonic() > until or (explain and wrong))):
                break
            trial = base.look(seen.case, remedies_of(entries_of(seen.mended)), seen.view)
            if trial is None or not trial.numbers:
                continue
            changes.compared += 1
            changes.altered += trial.numbers != seen.numbers
            altered = altered or (seen if trial.numbers != seen.numbers else None)
            if trial.signature is None or trial.verdict.undecided:
                continue
            wrong = wrong or seen
            changes.mends += (entry.id,) if entry is not None else ()
        if explain and (shown := wrong or altered) is not None and base is not None:
            until = time.monotonic() + self.plan.shrink_seconds
            self.effect = Effect(shown, self.matcher, base, until).explain(self.folder / "effect")

    def _to_compare(self) -> list[CaseSeen]:
        """The cases that are worth a run on the base, in their order: the ledger's own, and of each configuration two, those
        that ran what fewest ran; then two more of each."""
        often, of, place = Counter[str](), Counter[Case](), dict[int, tuple[bool, int, int]]()
        for seen in self._effects:
            often.update(executed_places(seen.differs))
        for number, seen in enumerate(self._effects):
            own = entry_of_case(seen.case, self.trials.run.mode) is not None
            rarest = min(often[name] for name in executed_places(seen.differs))
            place[number] = (not own, of[seen.case.configuration()] // _ALIKE, rarest)
            of[seen.case.configuration()] += 1
        return [self._effects[number] for number in sorted(place, key=lambda number: place[number])][:_COMPARED]

    @property
    def looked_enough(self) -> bool:
        """Whether a search that found nothing says something: one case was equal, as many ran as were asked for, or LEAST, as
        many of a long search ran the change, if there is one, no more than MOST_UNDECIDED of them were left undecided or with a
        gap, no block was given up, and what would not start is not to start."""
        tally = self.tally
        ran_enough = bool(tally.statuses["equal"]) and tally.cases >= min(LEAST, self.plan.max_cases)
        ran_enough &= tally.changes.differs is None or self.plan.max_cases < LEAST or tally.reached >= LEAST
        most = MOST_UNDECIDED * tally.cases
        return ran_enough and tally.undecided <= most and tally.gaps <= most and not tally.lost and not self.unstarted

    @property
    def unstarted(self) -> list[Unstarted]:
        """Engines that would not start, where nothing says that the engine does not have what they were to run: of a tree, or
        with a change in memory, that may be the fault that is searched for."""
        source = self.trials.host.source
        whole = not source.tree and not self.trials.run.patches
        return [] if whole else [one for one in self.tally.refused.values() if not one.ours]

    def _enough(self, pool: BlockPool) -> bool:
        if self._in_vain >= _IN_VAIN and not self.tally.cases:
            return True
        return self.tally.cases >= self.plan.max_cases or (self.seconds >= self.plan.seconds and not pool.replays)

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
            aside = AsideFacts(signature=signature, cases=0, example=str(file), undecided=undecided)
            self.asides[signature] = aside
        aside.cases += 1

    def tell(self) -> None:
        """Every few seconds, how far it is."""
        if time.monotonic() < self._told_at + _NEWS:
            return
        self._told_at, tally = time.monotonic(), self.tally
        known = sum(bug.cases for bug in tally.known.values())
        aside = sum(one.cases for one in self.asides.values() if one.signature in self.known)
        more = f", {known} with known bugs" if known else ""
        more += f", {aside} with what was found already" if aside else ""
        if (differs := tally.changes.differs) is not None and differs.places:
            ran = len(differs.places) - len(differs.unexecuted)
            more += f"; changed statements run: {ran} of {len(differs.places)}, in {count(tally.reached, 'case')}"
        self.progress(
            f"{count(tally.cases, 'case')} in {self.seconds:.0f} s, {tally.cases / max(self.seconds, 0.1):.1f}/s{more}"
        )
