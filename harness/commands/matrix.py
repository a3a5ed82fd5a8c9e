"""A matrix of questions and trees: a case as a release or a tree runs it, changed or not, and its verdict.

`prove`, `compare`, `bisect` and the tables of releases and models ask here, and classify the answers.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from eagletwin.cases.entry import Probe
from eagletwin.harness.check.confirm import Outcome, check, conclude, confirm, play
from eagletwin.harness.check.repro import write_script
from eagletwin.harness.check.trials import ask, judge_run, probe_text
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.differs import Watch
from eagletwin.harness.core.errors import EagletwinError, InputError
from eagletwin.harness.core.files import new_run_folder
from eagletwin.harness.core.run_spec import CPU, DEFAULT_RUN, Mode, RunSpec
from eagletwin.harness.core.verdict import Verdict
from eagletwin.harness.engines.host import Host, WouldNotStart
from eagletwin.harness.engines.provision import NotFetched
from eagletwin.harness.engines.source import Source
from eagletwin.harness.engines.start import Zygote
from eagletwin.harness.page.run import write_run


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked of an engine.

    what    a case, or a call of one function
    name    of the run folder below `out`
    run     what is changed in the engine, how it is driven, and how the case is judged
    again   the command that repeats it; "": none; None: `check` of the case in the run folder
    once    one run, kept as it is; else a divergence is confirmed in more
    script  the run of the reproduction script in the run folder; None: there is none
    after   cases that run before it in the same process
    found   of a case that was wrong after others: its verdict then, and these; it is confirmed
    known   whether a divergence is compared with the bugs of the ledger
    """

    what: Case | Probe
    name: str
    out: Path
    run: RunSpec = DEFAULT_RUN
    again: str | None = None
    once: bool = False
    script: RunSpec | None = None
    after: tuple[Case, ...] = ()
    found: tuple[Verdict, Sequence[Case]] | None = None
    known: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    """What an engine makes of a question: a cell of the matrix.

    verdict  unknown if nothing ran: `error` says why
    outcome  of a case that ran, with its run folder
    text     of a call, as a person reads it
    """

    verdict: Verdict
    outcome: Outcome | None = None
    error: EagletwinError | None = None
    text: str = ""

    @property
    def folder(self) -> Path | None:
        return self.outcome.folder if self.outcome is not None else None

    @property
    def run(self) -> Outcome | None:
        """The outcome; None if this engine does not run the case. Raises an error that is the harness's own."""
        if self.error is not None and not isinstance(self.error, WouldNotStart):
            raise self.error
        return self.outcome

    @property
    def summary(self) -> str:
        """Status and rule; "" if nothing ran."""
        return "" if self.error is not None else f"{self.verdict.status} {self.verdict.rule}".strip()

    def report(self, columns: int | None = None) -> str:
        """As a person reads it, in lines of so many columns, with the run folder."""
        if self.outcome is None:
            return self.text
        return f"{self.outcome.report if columns is None else self.outcome.text(columns)}\n  folder: {self.folder}\n"


def refused_cell(error: EagletwinError) -> Cell:
    return Cell(Verdict(status="unknown", reason=" ".join(error.cause.split())), error=error)


@dataclass(slots=True)
class Matrix:
    """Asks trees. One that cannot be imported is tried once: whatever else it is asked has the same answer."""

    _dead: dict[Host, EagletwinError] = field(default_factory=dict)

    def ask(self, host: Host | NotFetched, question: Question) -> Cell:
        """The answer, also where nothing could run. Raises InputError for options that fit no engine."""
        if isinstance(host, NotFetched):
            return refused_cell(host)
        if (dead := self._dead.get(host)) is not None:
            return refused_cell(dead)
        try:
            return _answer(host, question)
        except InputError:
            raise
        except EagletwinError as error:
            if isinstance(error, WouldNotStart) and not host.version:
                self._dead[host] = error
            return refused_cell(error)


def _answer(host: Host, question: Question) -> Cell:
    case, run = question.what, question.run
    if isinstance(case, Probe):
        verdict = ask(case, host, run.applied)
        return Cell(verdict, text=probe_text(case, verdict, host.version))
    engine = host.engine(case, run.applied, run.kernels)
    folder = new_run_folder(question.out, question.name)
    again = question.again
    if again is None:
        again = run.command("check", folder / "case.json")
    beside = host if question.known else None
    if question.script is not None:
        write_script(folder, case, question.script, command=again, source=host.source)
    if question.once:
        trace = play(engine, (), case, folder, run.limits)
        outcome = conclude(case, judge_run(trace, run), trace, folder, (), again)
    elif question.found is not None:
        outcome = confirm(engine, case, *question.found, folder, run, again=again, host=beside)
    else:
        outcome = check(engine, case, folder, run, after=question.after, again=again, host=beside)
    write_run(*outcome.of_page)
    return Cell(outcome.verdict, outcome)


@contextmanager
def hosts_of(
    sources: Sequence[Source], mode: Mode = CPU, watched: Sequence[Watch | None] = (None, None)
) -> Iterator[list[Host]]:
    """Hosts of several trees, which are imported at once. watched: what the engines of each look for."""
    with ExitStack() as stack:
        zygotes = [Zygote(source, mode, watch=watch) for source, watch in zip(sources, watched, strict=True)]
        for zygote in zygotes:
            stack.callback(zygote.close)
        for zygote in zygotes:
            zygote.start()
        yield [stack.enter_context(Host(zygote)) for zygote in zygotes]
