"""One comparison from its two names to its report: both SGLangs are started, asked question by question, and summed up."""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from eagletwin.cases.profiles import draw_from_seeds_alone
from eagletwin.harness.core.differs import Changes, doubts_of
from eagletwin.harness.core.errors import EXIT_HARNESS, EXIT_INTERRUPTED, AlreadyReported, EagletwinError
from eagletwin.harness.core.folders import new_run_folder
from eagletwin.harness.core.progress import Line, progress
from eagletwin.harness.core.run_spec import RunSpec
from eagletwin.harness.core.signature import Signature
from eagletwin.harness.core.words import count
from eagletwin.harness.engines.host import Host, WouldNotStart
from eagletwin.harness.engines.source import Source, resolve
from eagletwin.harness.engines.start import Zygote
from eagletwin.harness.page.render import write_page

from ..diff.pair import watches
from ..fuzz.options import Plan
from ..fuzz.steering import Steering
from ..options import tell
from .example import Example
from .groups import Answered, Result, breakages
from .page import RECORD, comparison_page
from .questions import Question
from .report import SIDES, Comparing, facts_of
from .sides import Sides


@dataclass(slots=True, kw_only=True)
class Asking:
    """What is asked of both sides, and the answers so far.

    names      what was typed for BASE and HEAD; words: the options that a person types
    questions  entries of the ledger, which come first; plan: of the generated cases
    """

    names: tuple[str, str]
    questions: Sequence[Question]
    plan: Plan
    words: Sequence[str]
    unreached: Sequence[str]
    run: RunSpec
    out: Path
    _answers: list[Answered] = field(default_factory=list)
    _examples: dict[Signature, Example] = field(default_factory=dict)
    _failed: str = ""
    _sides: Sides | None = None

    def report(self, show: Callable[[Comparing], None]) -> int:
        """Ask, show what came of it, and keep it in the run folder; the exit code. What ends it early loses no answer."""
        begun = time.monotonic()
        draw_from_seeds_alone()
        sources = resolve(self.names[0]), resolve(self.names[1])
        watched = watches(sources)
        folder = new_run_folder(self.out, "compare")
        mutual, ended = watched is not None and watched[0] is not None, None
        try:
            if watched is None or sources[0].called == sources[1].called:
                self._failed = "BASE and HEAD are the same SGLang, file by file"
            else:
                zygotes = [Zygote(source, self.run.mode, watch=one) for source, one in zip(sources, watched, strict=True)]
                self._ask(zygotes, folder, mutual=mutual)
        except KeyboardInterrupt:
            ended = EXIT_INTERRUPTED
            raise AlreadyReported(ended) from None
        except BaseException as error:
            ended = error.exit_code if isinstance(error, EagletwinError) else EXIT_HARNESS
            raise
        finally:
            one = self._comparing(sources, folder, time.monotonic() - begun, mutual=mutual, ended=ended)
            show(one)
            (folder / RECORD).write_text(json.dumps(facts_of(one), indent=1) + "\n", encoding="utf-8")
            write_page(folder, lambda: comparison_page(folder))
        return one.exit_code

    def _ask(self, zygotes: Sequence[Zygote], folder: Path, *, mutual: bool) -> None:
        with ExitStack() as stack:
            line = stack.enter_context(progress("cases"))
            for zygote in zygotes:
                stack.callback(zygote.close)
            for zygote in zygotes:  # they import at once
                zygote.start()
            hosts = [stack.enter_context(Host(zygote)) for zygote in zygotes]
            line.look("importing both SGLangs")
            for side, host in zip(SIDES, hosts, strict=True):
                try:
                    host.connection()
                except WouldNotStart as error:
                    tell(f"{side}: {error.kept_in(folder)}")
                    self._failed = f"{side}: {' '.join(error.cause.split())}"
                    return
            self._sides = sides = Sides((hosts[0], hosts[1]), self.names, self.run, folder, self.plan, mutual)
            steering = Steering(self.plan.seed, self.plan.asked)
            for question in self.questions:
                line.look(question.name)
                answer = sides.ask(question)
                self._take(answer, line)
                steering.add(question.case, reached=answer.reached is True)
            self._search(sides, steering, line)
            for broken in breakages(self._answers):
                line.look(f"{broken.signature} in {count(len(broken.answers), 'case')}: looking for the smallest")
                self._examples[broken.signature] = sides.example(broken, self.plan.shrink_seconds, line.look)

    def _search(self, sides: Sides, steering: Steering, line: Line) -> None:
        """The generated cases, until time or their number is up."""
        until = time.monotonic() + self.plan.seconds
        for block in steering.blocks():
            if sides.tally.cases >= self.plan.max_cases or time.monotonic() >= until:
                return
            for answer in sides.search(block):
                self._take(answer, line)
                steering.add(block.probe, reached=answer.reached is True)
                if sides.tally.cases >= self.plan.max_cases or time.monotonic() >= until:
                    break

    def _take(self, answer: Answered, line: Line) -> None:
        self._answers.append(answer)
        line.done(f"{answer.question.name}: {answer.group}")

    def _comparing(
        self, sources: tuple[Source, Source], folder: Path, seconds: float, *, mutual: bool, ended: int | None
    ) -> Comparing:
        sides = self._sides
        changes = (Changes(), Changes()) if sides is None else sides.changes
        each = [one.differs for one in changes if one.differs is not None]
        return Comparing(
            result=Result(tuple(self._answers), doubts_of(each, mutual=mutual), self._failed),
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
            left=len(self.questions) - sum(answer.question.entry is not None for answer in self._answers),
            not_looked_at=sides.tally.left_out(self.run.mode) if sides is not None and sides.tally.cases else (),
            known=sorted(bug.id for bug in sides.tally.known.values() if bug.cases) if sides is not None else (),
            unreached=self.unreached,
            ended=ended,
        )
