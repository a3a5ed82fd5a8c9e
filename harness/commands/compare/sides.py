"""Runs a question on BASE and on HEAD, and makes sure of what changed.

A first look is in a fork that may have run other cases. Whatever differs between the sides is run again, alone, on each. The
first case that is newly broken in its way (groups.Breakage) runs in three fresh forks of HEAD, in a run folder of its own.
"""

import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from msgspec.structs import replace as changed

from eagletwin.harness.check.confirm import brief, confirm
from eagletwin.harness.check.known import may_be
from eagletwin.harness.check.repro import write_script
from eagletwin.harness.check.trials import Trial, Trials
from eagletwin.harness.core.case import pretty_case
from eagletwin.harness.core.differs import Changes
from eagletwin.harness.core.records import Ending
from eagletwin.harness.core.run_spec import RunSpec
from eagletwin.harness.core.signature import Signature, signature_of
from eagletwin.harness.core.verdict import Verdict, View
from eagletwin.harness.engines.host import Host, WouldNotStart
from eagletwin.harness.page.run import write_run

from .accepted import RoundsOfBoth, count_rounds
from .groups import EQUAL, Answered, Breakage, SideResult, group_of
from .questions import Question
from .smallest import MINIMAL, Example, Smaller, example_of, size

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


@dataclass(frozen=True, slots=True)
class _Kept:
    """What came of a case that was run in fresh forks and kept."""

    head: SideResult
    again: str
    known: str = ""


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
    _broken_so: set[Signature] = field(default_factory=set)  # what was seen three times alone

    def ask(self, question: Question) -> Answered:
        """The question on both sides, confirmed where they differ. Raises HarnessError."""
        looks = self._look(BASE, question), self._look(HEAD, question)
        (base, one), (head, other) = looks
        if one is not None and other is not None:
            count_rounds(self.accepted, question, (one.header, other.header))
        group = group_of(base, head)
        if group == "newly broken":
            assert other is not None
            return self._broken(question, base, head, other)
        if group == "newly fixed":
            base, head = self._again(BASE, question, base), self._again(HEAD, question, head)
        known = self._known(question, head) if group == "still diverged" else ""
        side = BASE if group == "newly fixed" else HEAD
        again = "" if group == "as before" else self._command(question, side)
        return Answered(question, base, head, known, again)

    def _spec(self, side: int, question: Question) -> RunSpec:
        return changed(self.run, sglang=self.names[side], view=question.view)

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

    def _broken(self, question: Question, base: SideResult, head: SideResult, found: Trial) -> Answered:
        """Make sure of what is right on BASE and wrong on HEAD: alone on each, and thrice if it is the first of its kind."""
        base = self._again(BASE, question, base)
        ran = found.differs.ran if found.differs is not None else ()
        if head.signature in self._broken_so:
            head = self._again(HEAD, question, head)
            return Answered(question, base, head, again=self._command(question, HEAD), ran=ran)
        folder = self.folder / f"broken-{question.name}"
        kept = self._keep(question, found, folder)
        answer = Answered(question, base, kept.head, kept.known, kept.again, folder, ran)
        if answer.group == "newly broken" and kept.head.signature is not None:
            self._broken_so.add(kept.head.signature)
        return answer

    def _keep(self, question: Question, found: Trial, folder: Path) -> _Kept:
        """Run on HEAD what was found there, in fresh forks, and keep it in a run folder of its own."""
        spec, host = self._spec(HEAD, question), self.hosts[HEAD]
        folder.mkdir()
        again = self._command(question, HEAD, folder / "case.json")
        named = changed(spec, finding=str(found.signature or ""))
        write_script(folder, question.case, named, command=again, source=host.source)
        try:
            engine = host.engine(question.case, (), spec.kernels)
            outcome = confirm(engine, question.case, found.verdict, found.before, folder, spec, again=again, host=host)
        except WouldNotStart as error:
            return _Kept(SideResult("unknown", _one_line(error.cause)), again)
        write_run(outcome)
        head = said_by_verdict(outcome.verdict, outcome.trace.header.ending)
        return _Kept(head, outcome.again or again, outcome.known)

    def example(self, broken: Breakage, seconds: float) -> Example:
        """The smallest case that HEAD breaks so and BASE does not, made smaller for as long, and kept."""
        first = example_of(broken.first)
        question = min((answer.question for answer in broken.answers), key=lambda one: size(one.case))
        base, head = (self._trials[side, question.view] for side in (BASE, HEAD))
        begun = question.case
        search = Smaller(base, head, broken.signature, question, time.monotonic() + seconds)
        search.shrink()
        if broken.first.folder is None or size(search.smallest) >= size(first.case):
            return first
        if question.entry is None:
            question = replace(question, case=changed(search.smallest, name=f"minimal-{broken.first.question.name}"))
        there, _ = self._look(BASE, question, alone=True)
        _, found = self._look(HEAD, question, alone=True)
        if there != EQUAL or found is None:
            return first
        folder = broken.first.folder / MINIMAL
        kept = self._keep(question, found, folder)
        if kept.head.signature != broken.signature:
            return first
        return Example(question.case, kept.head.text, kept.again, folder, kept.known, begun, search.looks, search.partial)

    def _known(self, question: Question, head: SideResult) -> str:
        """The entry that explains what is wrong on both sides: its own, or one whose remedy makes the case equal."""
        if question.entry is not None and question.entry.rule == head.rule:
            return question.entry.id
        return may_be(self.hosts[HEAD], question.case, head.rule, self._spec(HEAD, question))
