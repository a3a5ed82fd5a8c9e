"""The smallest case that shows what a right change does: it is right, and the base is wrong, or records another value."""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from eagletwin.harness.check.confirm import brief
from eagletwin.harness.check.known import KnownBugMatcher, entries_of, remedies_of
from eagletwin.harness.check.trials import Base, Trial, Trials, judge_run
from eagletwin.harness.core.case import Case, pretty_case
from eagletwin.harness.core.errors import EagletwinError
from eagletwin.harness.core.patch import Patch
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.core.verdict import DECLARED_VIEW, Verdict
from eagletwin.harness.judge.trace_diff import diff

from . import paste
from .looking import CaseSeen
from .shrinking import reduce_case, sizes
from .tally import EffectFacts


@dataclass(slots=True)
class Effect:
    """Makes a case smaller that is right with the change, and wrong on the base; where the base is right, too, one of which it
    records another value.

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
        found = self._on_base(case)
        if found is None:
            return None
        fix = found.verdict.status == "diverged"

        def shows(smaller: Case) -> bool:
            there = self._on_base(smaller) if time.monotonic() < self.until else None
            return there is not None and (there.verdict.status == "diverged" or not fix)

        case = reduce_case(case, shows)
        shutil.rmtree(folder, ignore_errors=True)  # of a search that is resumed
        base, tree = (self._trace(trials, case, folder / side) for side, trials in self._sides.items())
        (folder / "case.json").write_text(pretty_case(case), encoding="utf-8")
        first = min(diff(base, tree).differences, key=lambda one: one.bits, default=None)
        if first is None:  # a recorded value differs from one run to the next
            return None
        verdict = judge_run(base, self._sides["base"].run)
        alone = self._wrong_alone(case)
        pasted = paste.write(folder, case, alone, self.base.called, self._patch) if alone is not None else ()
        return EffectFacts(
            case=str(folder / "case.json"),
            sizes=sizes(case),
            place=first.where,
            base=first.left,
            tree=first.right,
            on_base=brief(verdict) if verdict.status == "diverged" else verdict.status,
            runs=self.runs,
            partial=time.monotonic() >= self.until,
            paste=pasted,
        )

    @property
    def _patch(self) -> Patch | None:
        """The change, where edits of functions say all of it."""
        source, patches = self.matcher.host.source, self.matcher.run.patches
        if source.difference is None or patches:
            return patches[0] if source.difference is None and len(patches) == 1 else None
        return paste.patch_between(self.base.host.source.root, source.root, source.difference.watch)

    def _wrong_alone(self, case: Case) -> Verdict | None:
        """What is wrong on the base, and right with the change, where no known bug is mended, as where the case is pasted."""
        base, tree = self.base.look(case, (), DECLARED_VIEW), self.matcher.trials((), DECLARED_VIEW).look_alone(case)
        return base.verdict if base is not None and base.verdict.status == "diverged" and tree.clean else None

    @property
    def _sides(self) -> dict[str, Trials]:
        """Who runs cases on the base, and with the change."""
        view, entries = self.seen.view, entries_of(self.seen.mended)
        return {"base": self.base.trials(remedies_of(entries), view), "tree": self.matcher.trials(entries, view)}

    def _on_base(self, case: Case) -> Trial | None:
        """The case on the base, if the change is right there and the base records something else."""
        self.runs += 1
        base, tree = self._sides.values()
        try:
            changed = tree.look_alone(case)
            there = base.look_alone(case) if changed.clean and changed.numbers else None
        except EagletwinError:  # one of them has no such configuration
            return None
        return there if there is not None and there.numbers != changed.numbers else None

    def _trace(self, trials: Trials, case: Case, folder: Path) -> Trace:
        folder.mkdir(parents=True)
        return trials.stand(case).run(case, folder, trials.run.limits, fresh=True)
