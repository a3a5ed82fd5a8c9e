"""The smallest case that shows what a right change does: it is right, and a recorded value differs from the base's."""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from eagletwin.harness.check.confirm import brief
from eagletwin.harness.check.known import KnownBugMatcher, entries_of, remedies_of
from eagletwin.harness.check.trials import Base, Trials, judge_run
from eagletwin.harness.core.case import Case, pretty_case
from eagletwin.harness.core.errors import EagletwinError
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.judge.trace_diff import diff

from .looking import CaseSeen
from .shrinking import reduce_case, sizes
from .tally import EffectFacts


@dataclass(slots=True)
class Effect:
    """Makes a case smaller that is right with the change, and of which the base records another value.

    until  the time (monotonic) from which the smallest case so far counts; runs: smaller cases so far
    """

    seen: CaseSeen
    matcher: KnownBugMatcher
    base: Base
    until: float
    runs: int = 0

    def explain(self, folder: Path) -> EffectFacts | None:
        """The smallest case, written into `folder` with both traces. None: run alone it has no effect."""
        case = replace(self.seen.case, name="effect", exercises=())
        if not self._alters(case):
            return None
        case = reduce_case(case, lambda smaller: time.monotonic() < self.until and self._alters(smaller))
        shutil.rmtree(folder, ignore_errors=True)  # of a search that is resumed
        base, tree = (self._trace(trials, case, folder / side) for side, trials in self._sides.items())
        (folder / "case.json").write_text(pretty_case(case), encoding="utf-8")
        first = min(diff(base, tree).differences, key=lambda one: one.bits, default=None)
        if first is None:  # a recorded value differs from one run to the next
            return None
        verdict = judge_run(base, self._sides["base"].run)
        return EffectFacts(
            case=str(folder / "case.json"),
            sizes=sizes(case),
            place=first.where,
            base=first.left,
            tree=first.right,
            on_base=brief(verdict) if verdict.status == "diverged" else verdict.status,
            runs=self.runs,
            partial=time.monotonic() >= self.until,
        )

    @property
    def _sides(self) -> dict[str, Trials]:
        """Who runs cases on the base, and with the change."""
        view, entries = self.seen.view, entries_of(self.seen.mended)
        return {"base": self.base.trials(remedies_of(entries), view), "tree": self.matcher.trials(entries, view)}

    def _alters(self, case: Case) -> bool:
        self.runs += 1
        base, tree = self._sides.values()
        try:
            changed = tree.look_alone(case)
            return changed.clean and bool(changed.numbers) and base.look_alone(case).numbers != changed.numbers
        except EagletwinError:  # one of them has no such configuration
            return False

    def _trace(self, trials: Trials, case: Case, folder: Path) -> Trace:
        folder.mkdir(parents=True)
        return trials.stand(case).run(case, folder, trials.run.limits, fresh=True)
