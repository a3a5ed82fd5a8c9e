"""Runs a question on BASE and on HEAD, and makes sure of what changed.

A first look is in a fork that may have run other cases. Whatever differs between the sides is run again, alone: what is newly
broken in three fresh forks of HEAD, in a run folder of its own, and in one of BASE.
"""

from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from eagletwin.harness.check.confirm import brief, confirm
from eagletwin.harness.check.known import may_be
from eagletwin.harness.check.repro import write_script
from eagletwin.harness.check.trials import Trial, Trials
from eagletwin.harness.core.case import pretty_case
from eagletwin.harness.core.differs import Changes
from eagletwin.harness.core.records import Ending
from eagletwin.harness.core.run_spec import RunSpec
from eagletwin.harness.core.signature import signature_of
from eagletwin.harness.core.verdict import Verdict, View
from eagletwin.harness.engines.host import Host, WouldNotStart
from eagletwin.harness.page.run import write_run

from .accepted import RoundsOfBoth, count_rounds
from .groups import EQUAL, Answered, SideResult, group_of
from .questions import Question

_LONGEST = 240  # letters of a line about one side
BASE, HEAD = 0, 1


def said_by(trial: Trial) -> SideResult:
    """What a trial says of its side. That it runs none of the changes leaves what it compared as right as it was."""
    verdict = trial.verdict
    if verdict.status == "equal":
        return EQUAL
    if trial.unrun and set(trial.case.exercises) <= set(verdict.exercised):
        return EQUAL
    return said_by_verdict(verdict, trial.header.ending)


def said_by_verdict(verdict: Verdict, ending: Ending) -> SideResult:
    if verdict.status == "equal":
        return EQUAL
    broken = verdict.status == "diverged" or verdict.rule in ("engine.crash", "engine.hang")
    if verdict.status == "unknown":  # the reason comes before the first wrong number, if there is one
        what = f"{verdict.rule}: {verdict.reason}" if verdict.rule and verdict.first is None else verdict.reason
    else:
        what = brief(verdict)
    return SideResult("broken" if broken else "unknown", _one_line(what), signature_of(verdict, ending))


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"


@dataclass(slots=True)
class Sides:
    """Both sides of a comparison. changes: what of the difference ran on each; accepted: tokens a round, by configuration."""

    hosts: tuple[Host, Host]
    names: tuple[str, str]
    run: RunSpec
    folder: Path
    changes: tuple[Changes, Changes] = field(default_factory=lambda: (Changes(), Changes()))
    accepted: dict[tuple[str, str], RoundsOfBoth] = field(default_factory=dict)
    _trials: dict[tuple[int, View], Trials] = field(default_factory=dict)

    def ask(self, question: Question) -> Answered:
        """The question on both sides, confirmed where they differ. Raises HarnessError."""
        looks = self._look(BASE, question), self._look(HEAD, question)
        (base, one), (head, other) = looks
        if one is not None and other is not None:
            count_rounds(self.accepted, question, (one.header, other.header))
        group = group_of(base, head)
        if group == "newly broken":
            assert other is not None
            return self._broken(question, base, other)
        if group == "newly fixed":
            base, head = self._again(BASE, question, base), self._again(HEAD, question, head)
        known = self._known(question, head) if group == "still diverged" else ""
        side = BASE if group == "newly fixed" else HEAD
        again = "" if group == "as before" else self._command(question, side)
        return Answered(question, base, head, known, again)

    def _spec(self, side: int, question: Question) -> RunSpec:
        return replace(self.run, sglang=self.names[side], view=question.view)

    def _command(self, question: Question, side: int, file: Path | None = None) -> str:
        """What to type to see it on one side. A generated case is written down for it."""
        if question.entry is not None:
            return self._spec(side, question).command("check", question.entry.id)
        if file is None:
            file = self.folder / "cases" / f"{question.name}.json"
            file.parent.mkdir(exist_ok=True)
            file.write_text(pretty_case(question.case), encoding="utf-8")
        return self._spec(side, question).command("check", file)

    def _look(self, side: int, question: Question, *, alone: bool = False) -> tuple[SideResult, Trial | None]:
        """What a side says; an entry runs alone, as `check` has it."""
        key = side, question.view
        trials = self._trials.setdefault(key, Trials(self.hosts[side], self._spec(side, question)))
        try:
            look = trials.look_alone if alone or question.entry is not None else trials.look
            trial = look(question.case)
        except WouldNotStart as error:
            return SideResult("unknown", _one_line(error.cause)), None
        if not alone:  # what is run once more was counted
            self.changes[side].add(trial.differs)
        return said_by(trial), trial

    def _again(self, side: int, question: Question, first: SideResult) -> SideResult:
        """The same alone; unknown if it comes out otherwise."""
        second, _ = self._look(side, question, alone=True)
        if (second.status, second.signature) == (first.status, first.signature):
            return second
        return SideResult("unknown", _one_line(f"nondeterministic: first {first.text}; alone {second.text}"))

    def _broken(self, question: Question, base: SideResult, found: Trial) -> Answered:
        """Make sure of what is right on BASE and wrong on HEAD, and keep it in a run folder."""
        base = self._again(BASE, question, base)
        spec, host = self._spec(HEAD, question), self.hosts[HEAD]
        folder = self.folder / f"broken-{question.name}"
        folder.mkdir()
        again = self._command(question, HEAD, folder / "case.json")
        write_script(folder, question.case, spec, command=again, source=host.source)
        try:
            engine = host.engine(question.case, (), spec.kernels)
            outcome = confirm(engine, question.case, found.verdict, found.before, folder, spec, again=again, host=host)
        except WouldNotStart as error:
            return Answered(question, base, SideResult("unknown", _one_line(error.cause)), again=again, folder=folder)
        write_run(outcome)
        head = said_by_verdict(outcome.verdict, outcome.trace.header.ending)
        return Answered(question, base, head, outcome.known, outcome.again or again, folder)

    def _known(self, question: Question, head: SideResult) -> str:
        """The entry that explains what is wrong on both sides: its own, or one whose remedy makes the case equal."""
        if question.entry is not None and question.entry.rule == head.rule:
            return question.entry.id
        return may_be(self.hosts[HEAD], question.case, head.rule, self._spec(HEAD, question))
