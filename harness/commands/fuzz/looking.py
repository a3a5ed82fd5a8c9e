"""One block of a search after the other: its cases are run and judged, and what known bugs show is told from the rest.

A known live bug would eat the search: it shows in nearly every case of its kind, and hides what lies behind it. So in seven
of eight blocks the bugs that this engine was seen to have are mended, in memory. The eighth, if its cases are small, runs
the engine as it is, up to the first case that a known bug spoils, so that what a remedy replaces is looked at as well. What is
done with a case depends on its block alone, so that the same seed comes to the same on any number of cores.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import zip_longest
from random import Random

from msgspec import Struct
from msgspec.structs import replace

from eagletwin.cases.blocks import Block, block_of
from eagletwin.cases.entry import Entry
from eagletwin.harness.check.known import Explained, KnownBugMatcher, entry_of_case, may_show
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.differs import Differs, together
from eagletwin.harness.core.records import accept_lengths
from eagletwin.harness.core.run_spec import RunSpec
from eagletwin.harness.core.signature import Signature
from eagletwin.harness.core.verdict import DECLARED_VIEW, Verdict, View
from eagletwin.harness.engines.host import WouldNotStart

from .options import Plan

NO_BLOCK = -1  # of a case of the ledger, or of an earlier search, which no block draws


class Unstarted(Struct, frozen=True, tag=True):
    """An engine of this configuration would not start. ours: eagletwin does not run it, whatever the engine."""

    probe: Case
    why: str
    ours: bool


class CaseSeen(Struct, frozen=True, kw_only=True, tag=True):
    """What came of one generated case.

    block     its number; NO_BLOCK: none draws it
    signature what was found; None: nothing
    lengths   accept lengths of its rounds; rounds, tokens: how many rounds a case that finished had, and what they committed
    before    the cases that had run in the same process, of one in which something was found
    mended    entries of the ledger whose remedies it ran with, and the view in which it was judged
    could_show  those of them that it may show by itself: a block is mended for all that any of its cases may show
    known     entries that explain all that it showed as released, and what that was; the verdict is the one under their fixes
    cured     entries whose remedies make it equal, where the engine without the change that is searched is right without them
    tries     further runs that it took to tell
    numbers   a digest of what was recorded, where a changed statement ran and the case is equal
    """

    block: int
    case: Case
    verdict: Verdict
    signature: Signature | None = None
    lengths: tuple[int, ...] = ()
    rounds: int = 0
    tokens: int = 0
    fallbacks: tuple[str, ...] = ()
    differs: Differs | None = None
    before: tuple[Case, ...] = ()
    mended: tuple[str, ...] = ()
    could_show: tuple[str, ...] = ()
    view: View = DECLARED_VIEW
    known: tuple[str, ...] = ()
    shown: Signature | None = None
    cured: tuple[str, ...] = ()
    tries: int = 0
    numbers: str = ""


class BlockRunner:
    """Runs blocks of a search on the engines of one host."""

    def __init__(self, matcher: KnownBugMatcher, plan: Plan) -> None:
        self._matcher, self._plan = matcher, plan

    def block(self, number: int, earlier: Sequence[CaseSeen] = ()) -> Iterator[CaseSeen | Unstarted]:
        """The cases of a block, as they are run. earlier: what came of the first of them elsewhere; these are not run again."""
        yield from self.run(
            block_of(self._plan.seed, number, self._plan.asked), [seen for seen in earlier if seen.block == number]
        )

    def first(self, earlier: Sequence[CaseSeen] = ()) -> Iterator[CaseSeen | Unstarted]:
        """The cases that the search begins with, apart from those of which something came elsewhere. Those of one configuration
        share an engine. A case of the ledger is judged as its entry is."""
        alike, run = dict[tuple[Case, View], list[Case]](), self._matcher.run
        ran = {seen.case for seen in earlier if seen.block == NO_BLOCK}
        for case in self._plan.first:
            entry = entry_of_case(case, run.mode) if run.view == DECLARED_VIEW else None
            view = entry.within if entry is not None and self._matcher.is_needed(entry.within) else run.view
            alike.setdefault((case.configuration(), view), []).append(case)
        for (_, view), cases in alike.items():
            events = tuple(event for case in cases for event in case.events)
            requests = tuple(request for case in cases for request in case.requests)
            probe = replace(cases[0], events=events, requests=requests)
            for case in cases:
                if case in ran:
                    continue
                try:
                    yield self._case(NO_BLOCK, case, view, self._present(case, probe, view), ())
                except WouldNotStart as error:
                    yield Unstarted(case, " ".join(error.cause.split()), error.ours)

    def _present(self, case: Case, probe: Case, view: View) -> tuple[Entry, ...]:
        """What a case is mended for. An entry's own case is right with the fix of that bug alone: another one's may hide it."""
        found, entry = self._matcher.present(probe, view), entry_of_case(case, self._matcher.run.mode)
        return found if entry is None else tuple(one for one in found if one in (entry, entry.behind))

    def run(self, block: Block, earlier: Sequence[CaseSeen] = ()) -> Iterator[CaseSeen | Unstarted]:
        """The same of a block that was drawn."""
        probe = block.probe
        views = self._matcher.views(probe)
        view = views[Random(block.draw_seed).randrange(len(views))]
        try:
            mended = () if block.as_released else self._matcher.present(probe, view)
            self._matcher.trials(mended, view).stand(probe)
        except WouldNotStart as error:
            yield Unstarted(probe, " ".join(error.cause.split()), error.ours)
            if error.ours and block.production:  # a release that is not driven with graphs
                yield from self.run(block.as_always, earlier)
            return
        yield from self.drain_unexpected()
        yield from self._cases(block, view, mended, earlier)

    def drain_unexpected(self) -> Iterator[CaseSeen]:
        """Cases of the ledger that were run to see whether a known bug is here, and showed another."""
        while self._matcher.unexpected:
            trial, within = self._matcher.unexpected.pop(0)
            one = Explained((), (), trial)
            with suppress(WouldNotStart):  # with a remedy: then it is told as it was seen
                one = one if trial.verdict.undecided else self._matcher.explain(trial, within)
            yield _case_seen(NO_BLOCK, one, within, trial.signature, self._matcher.run)

    def _cases(
        self, block: Block, view: View, mended: tuple[Entry, ...], earlier: Sequence[CaseSeen]
    ) -> Iterator[CaseSeen | Unstarted]:
        told, cases = tuple[str, ...](), block.cases()
        if not cases:
            yield Unstarted(block.probe, "no generated case has this configuration", ours=True)
        for seen, case in zip_longest(earlier, cases):
            if seen is None:
                seen = self._case(block.number, case, view, mended, told)
                yield seen
            if seen.known:
                mended, told = self._matcher.present(block.probe, view), seen.known

    def _case(self, block: int, case: Case, view: View, mended: tuple[Entry, ...], told: tuple[str, ...]) -> CaseSeen:
        trial = self._matcher.trials(mended, view).look(case)
        shown, ran = trial.signature, self._matcher.ran
        one = Explained((), mended, trial)
        if shown is not None and not trial.verdict.undecided:
            one = self._matcher.explain(trial, view, mended, told)
        return replace(_case_seen(block, one, view, shown, self._matcher.run), tries=self._matcher.ran - ran)


def _case_seen(block: int, one: Explained, view: View, shown: Signature | None, run: RunSpec) -> CaseSeen:
    trial, found = one.trial, one.trial.signature
    own = {patch.name for patch in run.patches}  # what workarounds change is no part of the change
    differs = together([change for change in trial.changes if not change.patch or change.patch in own])
    committed = accept_lengths(trial.header.records)
    finished = trial.header.ending.kind == "finished"
    return CaseSeen(
        block=block,
        case=trial.case,
        verdict=trial.verdict,
        signature=found,
        lengths=tuple(sorted(set(committed))),
        rounds=len(committed) * finished,
        tokens=sum(committed) * finished,
        fallbacks=tuple(trial.header.fallbacks),
        differs=differs,
        numbers=trial.numbers if differs is not None and differs.ran and found is None else "",
        before=trial.before if found is not None else (),
        mended=tuple(entry.id for entry in one.mended),
        could_show=tuple(entry.id for entry in one.mended if may_show(entry, trial.case, run.mode)),
        view=view,
        known=tuple(entry.id for entry in one.known),
        shown=shown if one.known else None,
        cured=tuple(entry.id for entry in one.cured),
    )
