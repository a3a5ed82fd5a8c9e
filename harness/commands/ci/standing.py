"""How one SGLang stands to the ledger: which fixes it holds, which it lacks, and which live bugs it has."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from eagletwin.cases.regressions import LEDGER
from eagletwin.harness.check.confirm import check
from eagletwin.harness.check.known import may_have
from eagletwin.harness.check.repro import write_script
from eagletwin.harness.check.trials import Trials
from eagletwin.harness.core.run_spec import RunSpec
from eagletwin.harness.core.verdict import View
from eagletwin.harness.engines.host import Host, WouldNotStart
from eagletwin.harness.page.run import write_run

from ..compare.groups import SideResult
from ..compare.questions import Question
from ..compare.sides import said_by, said_by_verdict

# holds: a fixed bug does not show; lacks: it does; live: a bug that no release has fixed shows by its own rule, or a fixed one
# in a release that is known to have it; gone: such a bug does not show.
Stand = Literal["holds", "lacks", "live", "gone", "unknown"]


@dataclass(frozen=True, slots=True)
class Standing:
    """An entry on this SGLang. folder: the run folder, of what it lacks."""

    question: Question
    stand: Stand
    line: str = ""
    again: str = ""
    folder: Path | None = None

    @property
    def id(self) -> str:
        assert self.question.entry is not None
        return self.question.entry.id

    @property
    def counts(self) -> bool:
        """Whether the result rests on it: what is known to be broken decides nothing."""
        return self.stand in ("lacks", "unknown")


@dataclass(slots=True)
class OneSide:
    """Asks one SGLang for entries of the ledger."""

    host: Host
    run: RunSpec
    folder: Path
    _trials: dict[View, Trials] = field(default_factory=dict)

    def ask(self, question: Question) -> Standing:
        """One entry, alone in a process. What should hold and does not is confirmed, in a run folder of its own."""
        entry = question.entry
        assert entry is not None
        spec = replace(self.run, view=question.view)
        trials = self._trials.setdefault(question.view, Trials(self.host, spec))
        again = spec.command("check", entry.id)
        try:
            trial = trials.look_alone(question.case)
        except WouldNotStart as error:
            return Standing(question, "unknown", " ".join(error.cause.split()), again)
        said = said_by(trial)
        if may_have(self.host.source.called, entry):
            return of_known(question, said, self.host.source.called, again)
        if said.status != "broken":
            return Standing(question, "holds" if said.status == "equal" else "unknown", said.line, again)
        return self._confirm(question, spec, again)

    def _confirm(self, question: Question, spec: RunSpec, again: str) -> Standing:
        folder = self.folder / f"lacks-{question.name}"
        folder.mkdir()
        write_script(folder, question.case, spec, command=again, source=self.host.source)
        engine = self.host.engine(question.case, (), spec.kernels)
        outcome = check(engine, question.case, folder, spec, again=again)
        write_run(outcome)
        said = said_by_verdict(outcome.verdict, outcome.trace.header.ending)
        stand: Stand = "lacks" if said.status == "broken" else "unknown"
        line = said.line or "nondeterministic: it was wrong once, and right alone"
        return Standing(question, stand, line, again, folder)


def of_known(question: Question, said: SideResult, version: str, again: str) -> Standing:
    """An entry whose bug this SGLang is known to have. What breaks otherwise than the bug does may be another bug, which nobody
    knows; only in an old release may it be one that was fixed later."""
    entry = question.entry
    assert entry is not None
    if said.status != "broken":
        return Standing(question, "gone" if said.status == "equal" else "unknown", said.line, again)
    fixed_later = {other.rule for other in LEDGER.values() if other.fixed and may_have(version, other)}
    if said.rule in {entry.rule, *fixed_later}:
        return Standing(question, "live", said.line, again)
    return Standing(question, "unknown", f"its bug breaks {entry.rule}, and here another is the first: {said.line}", again)
