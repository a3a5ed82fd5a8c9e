"""Two releases or trees: runs a case on HEAD and on BASE, makes sure of what changed, and sums it all up.

A first look is in a fork that may have run other cases. Whatever differs between the sides is run again, alone, on each. The
first case that is newly broken in its way (groups.Breakage) runs in three fresh forks of HEAD, in a run folder of its own.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
from msgspec.structs import replace as replace_fields

from eagletwin.cases.blocks import Block
from eagletwin.cases.ledger import ENTRIES
from eagletwin.cases.sample_cases import draw_from_seeds_alone
from eagletwin.harness.check.confirm import brief
from eagletwin.harness.check.known import KnownBugMatcher, may_be, may_have
from eagletwin.harness.check.trials import Base, Trial
from eagletwin.harness.core.case import pretty_case
from eagletwin.harness.core.differs import Changes, Differs, Watch, doubts_of, runs_no_change
from eagletwin.harness.core.errors import EXIT_HARNESS, EXIT_INTERRUPTED, AlreadyReported, EagletwinError
from eagletwin.harness.core.files import new_run_folder
from eagletwin.harness.core.run_spec import RunSpec
from eagletwin.harness.core.signature import Signature, signature_of
from eagletwin.harness.core.terminal import Line, count, progress
from eagletwin.harness.core.verdict import Verdict
from eagletwin.harness.engines.host import Host, PatchDoesNotApply, WouldNotStart
from eagletwin.harness.engines.source import Source, resolve
from eagletwin.harness.page.render import write_page

from ..fuzz.coverage import measured_of
from ..fuzz.looking import NO_BLOCK, BlockRunner, CaseSeen, Unstarted
from ..fuzz.options import Plan
from ..fuzz.shrinking import ShrinkCallbacks, Shrinking, smaller
from ..fuzz.steering import Steering, executed_places
from ..fuzz.tally import LEAST, Tally
from ..matrix import Matrix, Question, hosts_of
from ..options import log_progress
from ..result import AcceptedFacts, ComparisonFacts, ExampleFacts
from .groups import (
    EQUAL,
    MINIMAL,
    Breakage,
    ComparedCase,
    Result,
    SharedCase,
    SideResult,
    breakages,
    count_rounds,
    example_facts,
    example_of,
    group_of,
)
from .numbers import watches
from .report import RECORD, SIDES, CompareReport, document_of, facts_of

_LONGEST = 240  # letters of a line about one side
BASE, HEAD = 0, 1


def said_by(trial: Trial) -> SideResult:
    """What a trial says of its side."""
    verdict = trial.verdict
    if trial.unrun:
        return EQUAL  # that it runs none of the changes leaves what it compared as right as it was
    return said_by_verdict(verdict, signature_of(verdict, trial.header.ending))


def said_by_verdict(verdict: Verdict, signature: Signature | None) -> SideResult:
    if verdict.status == "equal":
        return EQUAL
    broken = verdict.status == "diverged" or verdict.rule in ("engine.crash", "engine.hang")
    if verdict.status == "unknown":  # the reason comes before the first wrong number, if there is one
        what = f"{verdict.rule}: {verdict.reason}" if verdict.rule and verdict.first is None else verdict.reason
    else:
        what = brief(verdict)
    return SideResult("broken" if broken else "unknown", _one_line(what), signature)


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"


def ran_some(differs: Differs | None) -> bool | None:
    """Whether a case ran something of a change; None: what changed is not known."""
    return None if differs is None else differs.reached and bool(differs.functions or differs.modules)


def runs_as_base(differs: Differs | None) -> bool:
    """Whether a case ran on HEAD what BASE has, and nothing else: all that changed is functions, and it called none of them."""
    if differs is None or differs.ran:
        return False
    return bool(differs.functions) and not (differs.modules or differs.removed or differs.files)


@dataclass(slots=True)
class Sides:
    """Both sides of a comparison.

    every    whether all entries run on both, also where the code says what comes out
    plan     of a search on HEAD; steering: which block of it comes next; mutual: whether each side is compared with the other,
             file by file
    changes  what of the difference ran on each; accepted: tokens a round, by configuration; tally: of the generated cases
    """

    hosts: tuple[Host, Host]
    names: tuple[str, str]
    run: RunSpec
    folder: Path
    plan: Plan
    steering: Steering
    mutual: bool = False
    every: bool = False
    changes: tuple[Changes, Changes] = field(default_factory=lambda: (Changes(), Changes()))
    accepted: dict[tuple[str, str], AcceptedFacts] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)
    _matcher: tuple[KnownBugMatcher, KnownBugMatcher] = field(init=False)
    _seen: dict[str, CaseSeen] = field(default_factory=dict)  # what is newly broken and was generated
    _broken_so: set[Signature] = field(default_factory=set)  # what was seen three times alone

    def __post_init__(self) -> None:
        base, head = (replace_fields(self.run, release=name) for name in self.names)
        self._matcher = KnownBugMatcher(self.hosts[BASE], base), KnownBugMatcher(self.hosts[HEAD], head)
        self._matcher[HEAD].base = Base(self.hosts[BASE], base)

    def believes(self, question: SharedCase) -> bool:
        """Whether an entry need not run: a live bug, and on both sides the code that its candidate fix edits is that of the
        newest release, where the tests prove it."""
        entry = question.entry
        return (
            entry is not None and not self.every and all(matcher.as_proven(entry, question.view) for matcher in self._matcher)
        )

    def ask(self, question: SharedCase) -> ComparedCase:
        """An entry of the ledger, alone on each side as `check` has it. Raises HarnessError."""
        head, trial = self._look(HEAD, question, alone=True)
        if trial is not None and question.entry is not None:
            self.changes[HEAD].add(trial.differs)
            self._matcher[HEAD].saw(question.entry, question.view, trial)
        return self._answer(question, head, trial.differs if trial is not None else None, trial)

    def search(self, block: Block) -> Iterator[ComparedCase]:
        """The cases of a block: on HEAD as `fuzz` has them, and on BASE with the same remedies. Raises HarnessError."""
        try:
            for number, seen in enumerate(BlockRunner(self._matcher[HEAD], self.plan).run(block), 1):
                if isinstance(seen, Unstarted):
                    yield from self._answer_unstarted(seen, block)
                else:
                    drawn = seen.block != NO_BLOCK  # else it is an entry's case, which shows another bug than the entry's
                    name = f"{seen.case.model}-{block.number}-{number}" if drawn else f"{seen.case.name}-otherwise"
                    yield self._answer_generated(seen, block if drawn else None, name)
        except WouldNotStart as error:
            yield from self._answer_unstarted(Unstarted(block.probe, error.cause, error.ours), block)

    def _answer_unstarted(self, refused: Unstarted, block: Block) -> Iterator[ComparedCase]:
        self.tally.refuse(refused)
        if not refused.ours:
            question = SharedCase(f"{refused.probe.model}-{block.number}", refused.probe)
            yield self._answer(question, SideResult("unknown", _one_line(refused.why)), None, None)

    def _answer_generated(self, seen: CaseSeen, block: Block | None, name: str) -> ComparedCase:
        self.tally.add(seen)
        self.changes[HEAD].add(seen.differs)
        question = SharedCase(name, seen.case, seen.view, mended=tuple(ENTRIES[one] for one in seen.mended), block=block)
        unrun = runs_no_change(seen.verdict, seen.differs)
        said = EQUAL if unrun else said_by_verdict(seen.verdict, seen.signature)
        return self._answer(question, said, seen.differs, seen)

    def _answer(
        self, question: SharedCase, head: SideResult, differs: Differs | None, found: Trial | CaseSeen | None
    ) -> ComparedCase:
        """The same with what BASE makes of it, confirmed where the two differ."""
        ran = [*executed_places(differs)]
        answer = self._of_both(question, head, differs, found, ran)
        self.steering.add(question.case, ran, NO_BLOCK if question.block is None else question.block.number)
        return answer

    def _of_both(
        self,
        question: SharedCase,
        head: SideResult,
        differs: Differs | None,
        found: Trial | CaseSeen | None,
        ran: list[str],
    ) -> ComparedCase:
        """ran: the changed statements that HEAD ran; gets those of BASE."""
        reached = ran_some(differs)
        if self.mutual and runs_as_base(differs) and (head == EQUAL or self._is_live(question, head)):
            known = "" if head == EQUAL or question.entry is None else question.entry.id
            return ComparedCase(question, head, head, known, reached=reached)
        entry = question.entry
        if entry is not None and not self.every and head == EQUAL and self._matcher[BASE].right_as_proven(entry):
            return ComparedCase(question, EQUAL, head, reached=reached, believed=True)
        base, trial = self._look(BASE, question, alone=question.entry is not None)
        if trial is not None:
            self.changes[BASE].add(trial.differs)
            self._compare_numbers(found, trial)
            if self.mutual:
                reached = reached or ran_some(trial.differs)
                ran += executed_places(trial.differs)
            if isinstance(found, CaseSeen):
                count_rounds(self.accepted, question, trial.header, (found.rounds, found.tokens))
        group = group_of(base, head)
        if group == "newly broken":
            assert found is not None
            return replace(self._broken(question, head, found), reached=reached)
        if group == "newly fixed":
            base, head = self._again(BASE, question, base), self._again(HEAD, question, head)
        known = self._explaining_entry(question, head) if group == "still diverged" else ""
        side = BASE if group == "newly fixed" else HEAD
        again = "" if group == "as before" else self._command(question, side)
        return ComparedCase(question, base, head, known, again, reached=reached)

    def _compare_numbers(self, found: Trial | CaseSeen | None, base: Trial) -> None:
        """Count a case that is right on HEAD and ran the change: whether a number of it is another one on BASE."""
        changes = self.changes[HEAD]
        if found is not None and found.differs is not None and found.differs.ran and found.verdict.status == "equal":
            changes.compared += 1
            changes.altered += found.numbers != base.numbers

    def _spec(self, side: int, question: SharedCase) -> RunSpec:
        return self._matcher[side].trials(question.mended, question.view).run

    def _command(self, question: SharedCase, side: int, file: Path | None = None) -> str:
        """What to type to see it on one side. A generated case is written down for it."""
        if question.entry is not None:
            return self._spec(side, question).command("check", question.entry.id)
        if file is None:
            file = self.folder / "cases" / f"{question.name}.json"
            file.parent.mkdir(exist_ok=True)
            file.write_text(pretty_case(question.case), encoding="utf-8")
        return self._spec(side, question).command("check", file)

    def _look(self, side: int, question: SharedCase, *, alone: bool = False) -> tuple[SideResult, Trial | None]:
        """What a side says. A remedy of HEAD's bugs may not fit BASE: then BASE runs with those of its own."""
        matcher = self._matcher[side]
        try:
            try:
                trials = matcher.trials(question.mended, question.view)
                trials.stand(question.case)
            except PatchDoesNotApply:
                question = replace(question, mended=matcher.present(question.case, question.view))
                trials = matcher.trials(question.mended, question.view)
            trial = trials.look_alone(question.case) if alone else trials.look(question.case)
        except (WouldNotStart, PatchDoesNotApply) as error:
            return SideResult("unknown", _one_line(error.cause)), None
        return said_by(trial), trial

    def _again(self, side: int, question: SharedCase, first: SideResult) -> SideResult:
        """The same alone; unknown if it comes out otherwise."""
        second, _ = self._look(side, question, alone=True)
        if (second.status, second.signature) == (first.status, first.signature):
            return second
        return SideResult("unknown", _one_line(f"nondeterministic: first {first.text}; alone {second.text}"))

    def _broken(self, question: SharedCase, head: SideResult, found: Trial | CaseSeen) -> ComparedCase:
        """Make sure of what is right on BASE and wrong on HEAD: alone on each, and thrice if it is the first of its kind."""
        base = self._again(BASE, question, EQUAL)
        ran = found.differs.ran if found.differs is not None else ()
        if head.signature in self._broken_so:
            head = self._again(HEAD, question, head)
            return ComparedCase(question, base, head, again=self._command(question, HEAD), ran=ran)
        folder = self.folder / f"broken-{question.name}"
        head, known, again = self._keep(question, found, folder)
        answer = ComparedCase(question, base, head, known, again, folder, ran)
        if answer.group == "newly broken" and head.signature is not None:
            self._broken_so.add(head.signature)
            if isinstance(found, CaseSeen):
                self._seen[question.name] = replace_fields(found, signature=head.signature)
        return answer

    def _keep(self, question: SharedCase, found: Trial | CaseSeen, folder: Path) -> tuple[SideResult, str, str]:
        """Run on HEAD what was found there, in fresh forks and a run folder of its own: what HEAD says, the known bug that
        it may be, and the command."""
        spec, host = self._spec(HEAD, question), self.hosts[HEAD]
        again = self._command(question, HEAD, folder / "case.json")
        answer = Matrix().ask(
            host,
            Question(
                what=question.case,
                name=folder.name,
                out=folder.parent,
                run=spec,
                again=again,
                script=replace_fields(spec, finding=str(found.signature or "")),
                found=(found.verdict, found.before),
                known=True,
            ),
        )
        if (outcome := answer.run) is None:
            return SideResult("unknown", _one_line(answer.verdict.reason)), "", again
        head = said_by_verdict(outcome.verdict, signature_of(outcome.verdict, outcome.trace.header.ending))
        return head, outcome.known, outcome.again or again

    def example(self, broken: Breakage, seconds: float, look: Callable[[str], None]) -> ExampleFacts:
        """A case that HEAD breaks so and BASE does not, made smaller for as long, and kept."""
        first, question = example_of(broken, self.run), broken.first.question
        seen, folder = self._seen.get(question.name), broken.first.folder
        if seen is None or folder is None or not seconds:
            return first
        matcher = self._matcher[HEAD]
        shrinking = Shrinking(
            seen,
            matcher,
            folder,
            seconds=seconds,
            seed=self.plan.seed,
            command=self.plan.command,
            teller=ShrinkCallbacks(aside=lambda *_: None, news=lambda _: None, look=look),
        )
        try:
            shrinking.shrink(question.block, lambda case: matcher.right_in_base(case, question.mended, question.view))
            finding = shrinking.conclude(len(broken.answers), 0.0)
        except EagletwinError:
            return first
        outcome, line = finding.outcome, said_by_verdict(finding.outcome.verdict, finding.signature).text
        if finding.signature != broken.signature or finding.status == "equal":
            return first
        return example_facts(
            broken,
            outcome.case,
            self.run,
            line=line,
            changes=question.changes,
            shrunk=smaller(seen.case, outcome.case),
            looks=finding.shrink_looks,
            partial=finding.partial,
            known=outcome.known,
            again=outcome.again,
            folder=str(folder / MINIMAL),
        )

    def _is_live(self, question: SharedCase, head: SideResult) -> bool:
        """Whether HEAD shows no more than the entry's own bug, which its release is known to have."""
        entry = question.entry
        return entry is not None and entry.rule == head.rule and may_have(self.hosts[HEAD].source.called, entry)

    def _explaining_entry(self, question: SharedCase, head: SideResult) -> str:
        """The entry that explains what is wrong on both sides: its own, or one whose remedy makes the case equal."""
        if question.entry is not None and question.entry.rule == head.rule:
            return question.entry.id
        return may_be(self.hosts[HEAD], question.case, head.rule, self._spec(HEAD, question))


@dataclass(slots=True, kw_only=True)
class ComparisonRun:
    """What is asked of both sides, and the answers so far.

    names      what was typed for BASE and HEAD; words: the options that a person types
    questions  entries of the ledger, which come first; plan: of the generated cases
    every      whether all of these run on both sides, also where the code says what comes out
    """

    names: tuple[str, str]
    questions: Sequence[SharedCase]
    every: bool
    plan: Plan
    words: Sequence[str]
    unreached: Sequence[str]
    run: RunSpec
    out: Path
    _answers: list[ComparedCase] = field(default_factory=list)
    _believed: list[str] = field(default_factory=list)
    _examples: dict[Signature, ExampleFacts] = field(default_factory=dict)
    _failed: str = ""
    _sides: Sides | None = None

    def report(self, show: Callable[[ComparisonFacts], None]) -> int:
        """Ask, show what came of it, and keep it in the run folder; the exit code. What ends it early loses no answer."""
        begun = time.monotonic()
        draw_from_seeds_alone()
        sources = resolve(self.names[0], self.run.mode.engine), resolve(self.names[1], self.run.mode.engine)
        watched = watches(sources)
        folder = new_run_folder(self.out, "compare")
        mutual, ended = watched is not None and watched[0] is not None, None
        try:
            if watched is None or sources[0].called == sources[1].called:
                trees = watched is not None and any(source.tree for source in sources)
                same = (
                    "have one name and differ: one has another RECORD"
                    if trees
                    else f"are the same {self.run.mode.title}, file by file"
                )
                self._failed = f"BASE and HEAD {same}"
            else:
                with hosts_of(sources, self.run.mode, watched) as hosts:
                    self._ask((hosts[0], hosts[1]), watched[HEAD], folder)
        except KeyboardInterrupt:
            ended = EXIT_INTERRUPTED
            raise AlreadyReported(ended) from None
        except BaseException as error:
            ended = error.exit_code if isinstance(error, EagletwinError) else EXIT_HARNESS
            raise
        finally:
            one = self._comparing(sources, folder, time.monotonic() - begun, mutual=mutual, ended=ended)
            show(facts := facts_of(one))
            (folder / RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(facts), indent=1) + b"\n")
            write_page(folder, lambda: document_of(facts, folder))
        return one.exit_code

    def _ask(self, hosts: tuple[Host, Host], watch: Watch | None, folder: Path) -> None:
        """watch: in what HEAD differs from BASE, file by file."""
        with progress("cases") as line:
            line.look("importing both")
            for side, host in zip(SIDES, hosts, strict=True):
                try:
                    host.connection()
                except WouldNotStart as error:
                    log_progress(f"{side}: {error.kept_in(folder)}")
                    self._failed = f"{side}: {' '.join(error.cause.split())}"
                    return
            steering = Steering(self.plan.seed, self.plan.asked, measured_of(hosts[HEAD].source.root, watch))
            mutual = watch is not None
            self._sides = sides = Sides(hosts, self.names, self.run, folder, self.plan, steering, mutual, self.every)
            for question in self.questions:
                if sides.believes(question):
                    self._believed.append(question.name)
                    continue
                line.look(question.name)
                self._take(sides.ask(question), line)
            self._search(sides, line)
            for broken in breakages(self._answers):
                line.look(f"{broken.signature} in {count(len(broken.answers), 'case')}: looking for the smallest")
                self._examples[broken.signature] = sides.example(broken, self.plan.shrink_seconds, line.look)

    def _search(self, sides: Sides, line: Line) -> None:
        """The generated cases, until time or their number is up."""
        until = time.monotonic() + self.plan.seconds
        for block in sides.steering.blocks():
            if sides.tally.cases >= self.plan.max_cases or time.monotonic() >= until:
                return
            for answer in sides.search(block):
                self._take(answer, line)
                if sides.tally.cases >= self.plan.max_cases or time.monotonic() >= until:
                    break

    def _take(self, answer: ComparedCase, line: Line) -> None:
        self._answers.append(answer)
        line.done(f"{answer.question.name}: {answer.group}")

    def _comparing(
        self, sources: tuple[Source, Source], folder: Path, seconds: float, *, mutual: bool, ended: int | None
    ) -> CompareReport:
        sides = self._sides
        changes = (Changes(), Changes()) if sides is None else sides.changes
        each = [one.differs for one in changes if one.differs is not None]
        return CompareReport(
            result=Result(
                tuple(self._answers),
                doubts_of(each, mutual=mutual),
                self._failed,
                LEAST if self.plan.max_cases >= LEAST else 0,
            ),
            names=self.names,
            versions=(sources[0].called, sources[1].called),
            command=self.plan.command,
            words=self.words,
            run=self.run,
            folder=folder,
            seconds=seconds,
            changes=changes,
            mutual=mutual,
            examples=self._examples,
            accepted=() if sides is None else tuple(sides.accepted.values()),
            left=len(self.questions) - sum(answer.question.entry is not None for answer in self._answers) - len(self._believed),
            believed=tuple(self._believed),
            not_looked_at=sides.tally.left_out(self.run.mode) if sides is not None and sides.tally.cases else (),
            known=sorted(bug.id for bug in sides.tally.known.values() if bug.cases) if sides is not None else (),
            unreached=self.unreached,
            ended=ended,
        )
