"""What a search does, once, with a case that shows something new: it asks whether a bug is behind it that such a case was not
thought to show, and makes the case small."""

from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from eagletwin.cases.blocks import block_of
from eagletwin.cases.entry import Entry
from eagletwin.harness.check.known import Mends, entries_of, may_be
from eagletwin.harness.check.trials import Trials

from .looking import NO_BLOCK, CaseSeen
from .plan import Plan
from .shrinking import Finding, Shrinking, Teller


@dataclass(slots=True)
class Inquiry:
    """The inquiry into one case. seen: after `bug`, with the entries that make it equal though it is new."""

    mends: Mends
    plan: Plan
    seen: CaseSeen

    def bug(self) -> str:
        """The id of the known bug that is behind it; empty: it is new."""
        seen, trials = self.seen, self._trials
        if seen.verdict.status != "diverged" or trials.look_alone(seen.case).signature != seen.signature:
            return ""  # what does not show alone is gone with any remedy
        bug = may_be(trials.host, seen.case, seen.verdict.rule, trials.run) if not seen.cured else ""
        if bug and self.mends.right_in_base(seen.case, self._mended, seen.view):
            self.seen = replace(seen, cured=(bug,))
            return ""
        return bug

    def begin(self, folder: Path, teller: Teller) -> Shrinking:
        """The shrinking, which has the case as it was found on disk."""
        plan = self.plan
        return Shrinking(
            self.seen,
            self.mends,
            folder,
            seconds=plan.shrink_seconds,
            seed=plan.seed,
            command=plan.command,
            teller=teller,
        )

    def finish(self, shrinking: Shrinking, cases: int, seconds: float) -> Finding:
        """Make it small, and confirm it. cases, seconds: until it was found."""
        seen, plan = self.seen, self.plan
        shrinking.shrink(
            None if seen.block == NO_BLOCK else block_of(plan.seed, seen.block, plan.asked),
            (lambda case: self.mends.right_in_base(case, self._mended, seen.view)) if seen.cured else None,
        )
        return shrinking.conclude(cases, seconds, self._apart)

    @property
    def past(self) -> str:
        """Why it is no known bug, where a remedy makes it equal: a part of a sentence."""
        return f", which {self._called} does not show" if self.seen.cured else ""

    @property
    def _trials(self) -> Trials:
        return self.mends.trials(self._mended, self.seen.view)

    @property
    def _mended(self) -> tuple[Entry, ...]:
        return entries_of(self.seen.mended)

    @property
    def _called(self) -> str:
        return "" if self.mends.base is None else self.mends.base.called

    @property
    def _apart(self) -> str:
        """Why what was found is no known bug, though remedies mend it; empty if none does."""
        if not self.seen.cured:
            return ""
        names = " and ".join(self.seen.cured)
        return f"With the remedy of {names} it is equal, too, but {self._called} is right in this case, so the change is wrong."
