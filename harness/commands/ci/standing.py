"""How one SGLang stands to the ledger: which fixes it holds, which it lacks, and which live bugs it has."""

from dataclasses import dataclass, field
from dataclasses import replace as replaced
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.check.confirm import check
from eagletwin.harness.check.known import may_have
from eagletwin.harness.check.repro import write_script
from eagletwin.harness.check.trials import Trials
from eagletwin.harness.core.differs import Differs
from eagletwin.harness.core.run_spec import RunSpec
from eagletwin.harness.core.signature import signature_of
from eagletwin.harness.core.verdict import View
from eagletwin.harness.engines.host import Host, WouldNotStart
from eagletwin.harness.judge.completeness import shows_instead
from eagletwin.harness.page.run import write_run

from ..compare.groups import SideResult
from ..compare.questions import Question
from ..compare.sides import said_by, said_by_verdict

# holds: a fixed bug does not show; lacks: it does; wrong: its case is wrong by another rule than the bug breaks; live: a bug
# that no release has fixed shows by its own rule, or a fixed one in a release that is known to have it; gone: such a bug does
# not show.
Stand = Literal["holds", "lacks", "wrong", "live", "gone", "unknown"]
WORSE: tuple[Stand, ...] = ("lacks", "wrong")


@dataclass(frozen=True, slots=True)
class Standing:
    """An entry on this SGLang. folder: the run folder, of what is wrong; differs: what was changed, and what of that ran."""

    question: Question
    stand: Stand
    line: str = ""
    again: str = ""
    folder: Path | None = None
    differs: Differs | None = None

    @property
    def id(self) -> str:
        assert self.question.entry is not None
        return self.question.entry.id

    @property
    def counts(self) -> bool:
        """Whether the result rests on it: what is known to be broken decides nothing."""
        return self.stand in (*WORSE, "unknown")


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
        decided = decide(question, said, self.host.source.called, again)
        decided = self._confirm(question, spec, again) if decided is None else decided
        return replaced(decided, differs=trial.differs)

    def _confirm(self, question: Question, spec: RunSpec, again: str) -> Standing:
        folder = self.folder / f"lacks-{question.name}"
        folder.mkdir()
        write_script(folder, question.case, spec, command=again, source=self.host.source)
        engine = self.host.engine(question.case, (), spec.kernels)
        outcome = check(engine, question.case, folder, spec, again=again)
        write_run(outcome)
        said = said_by_verdict(outcome.verdict, signature_of(outcome.verdict, outcome.trace.header.ending))
        line = said.line or "nondeterministic: it was wrong once, and right alone"
        return Standing(question, _stand_of(question, said), line, again, folder)


def _stand_of(question: Question, said: SideResult) -> Stand:
    """Of a bug that was fixed, and whose case was confirmed. By another rule it may be any bug that the case meets first."""
    if said.status != "broken":
        return "unknown"
    assert question.entry is not None
    own = said.rule == question.entry.rule or shows_instead(said.rule, question.entry.rule)
    return "lacks" if own else "wrong"


def decide(question: Question, said: SideResult, version: str, again: str) -> Standing | None:
    """What one look says of an entry; None: what should hold does not, which is to be confirmed.

    What breaks otherwise than a known bug does may be another bug, which nobody knows. An old release has bugs that were fixed
    later: in the case of another entry one of them may come first.
    """
    entry = question.entry
    assert entry is not None
    known = may_have(version, entry)
    if said.status != "broken":
        stand: Stand = "unknown" if said.status == "unknown" else "gone" if known else "holds"
        return Standing(question, stand, said.line, again)
    fixed_later = said.rule in {other.rule for other in LEDGER.values() if other.fixed and may_have(version, other)}
    if known and (fixed_later or said.rule == entry.rule):
        return Standing(question, "live", said.line, again)
    if known:
        return Standing(question, "unknown", f"its bug breaks {entry.rule}, and here another is the first: {said.line}", again)
    return Standing(question, "unknown", f"it may be a bug that was fixed later: {said.line}", again) if fixed_later else None
