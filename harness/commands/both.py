"""`eagletwin check CASE` on both engines, or on both model runners of one: one checkpoint, one reference, two verdicts."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from msgspec.structs import replace

from eagletwin.harness.check.confirm import Outcome, brief
from eagletwin.harness.core.case import Case, ModelRunner
from eagletwin.harness.core.errors import EXIT_UNKNOWN
from eagletwin.harness.core.run_spec import ENGINES, RunSpec
from eagletwin.harness.core.terminal import show
from eagletwin.harness.core.verdict import Verdict
from eagletwin.harness.engines.host import Host
from eagletwin.harness.engines.source import resolve
from eagletwin.harness.families.valid import not_driven
from eagletwin.harness.judge.engines import first_parting

from .matrix import Matrix, Question
from .options import nothing_run, on_engine
from .prove.proof import worst
from .result import BothFacts, CheckFacts, emit_result


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two. title: what the report calls it; short: of its run folder; again: the command for it alone."""

    title: str
    short: str
    case: Case
    run: RunSpec
    again: str


@dataclass(frozen=True, slots=True)
class TwoRuns:
    """Both sides. what: "engines"; again: the command that runs both."""

    what: str
    sides: tuple[Side, ...]
    again: str


def both_engines(name: str, case: Case, spec: RunSpec) -> TwoRuns:
    """Each engine as it is released. Raises InputError for a run that names code or changes of one engine."""
    runs = [on_engine(spec, engine) for engine in ENGINES]
    sides = [Side(run.mode.title, run.mode.engine, case, run, run.command("check", name)) for run in runs]
    words = [word for engine in ENGINES for word in ("--engine", engine)]
    return TwoRuns("engines", tuple(sides), f"{runs[0].command('check', name)} {' '.join(words)}")


def on_runner(case: Case, runner: Any) -> Case:
    """The case on this model runner."""
    return replace(case, engine=replace(case.engine, vllm=replace(case.vllm, model_runner=runner)))


def both_runners(name: str, case: Case, spec: RunSpec) -> TwoRuns:
    """Each model runner of one release or tree."""
    words = {runner: ("--model-runner", runner) for runner in sorted(get_args(ModelRunner))}
    sides = [
        Side(
            f"runner {runner.upper()} of {spec.mode.title}",
            runner,
            on_runner(case, runner),
            spec,
            spec.command("check", name, *own),
        )
        for runner, own in words.items()
    ]
    again = spec.command("check", name, *(word for own in words.values() for word in own))
    return TwoRuns("model runners", tuple(sides), again)


def run_on_both(pair: TwoRuns, before: Sequence[Case], out: Path) -> int:
    """Run a case on each side, and say where the two part. Raises InputError for a case that one of them does not run."""
    for side in pair.sides:
        if why := not_driven(side.case, side.run.mode):
            raise nothing_run(
                f"{side.case.name} on both {pair.what}: {why}",
                "give one --engine and one --model-runner, or a case that both run",
            )
    matrix, outcomes = Matrix(), list[Outcome]()
    with ExitStack() as stack:
        hosts = dict[RunSpec, Host]()
        for side in pair.sides:
            run, title = side.run, f"{side.case.name}-{side.short}"
            if run not in hosts:
                hosts[run] = stack.enter_context(Host(source=resolve(run.release, run.mode.engine), mode=run.mode))
            first = tuple(replace(one, engine=side.case.engine) for one in before)
            question = Question(what=side.case, name=title, out=out, run=run, again=side.again, after=first, known=True)
            cell = matrix.ask(hosts[run], question)
            if (outcome := cell.run) is None:
                print(f"UNKNOWN  {side.case.name} on {side.title}\n\n  {cell.error}")
                return EXIT_UNKNOWN
            outcomes.append(outcome)
    code = worst([side.run.exit_code(outcome.verdict) for side, outcome in zip(pair.sides, outcomes, strict=True)])
    lines = [f"{_line(side, outcome)}\n  folder: {outcome.folder}" for side, outcome in zip(pair.sides, outcomes, strict=True)]
    parting = _parting(pair.sides, outcomes)
    show("\n".join([*lines, "", f"  {parting}", "", f"  again: {pair.again}"]))
    emit_result(BothFacts(runs=[run_facts(outcome) for outcome in outcomes], parting=parting, again=pair.again))
    return code


def run_facts(outcome: Outcome) -> CheckFacts:
    """A run as --json has it."""
    return CheckFacts(
        case=outcome.case.name,
        sglang=outcome.trace.header.engine.version,
        verdict=outcome.verdict,
        folder=str(outcome.folder),
        again=outcome.again,
        known=outcome.known,
    )


def _line(side: Side, outcome: Outcome) -> str:
    verdict = outcome.verdict
    what = "" if verdict.status == "equal" else f": {brief(verdict)}"
    return f"{verdict.status.upper()}  {outcome.case.name} on {side.title} {outcome.trace.header.engine.version}{what}"


def _place(verdict: Verdict) -> str:
    return f"request {verdict.first.request}, {brief(verdict)}" if verdict.first else brief(verdict)


def _parting(sides: Sequence[Side], outcomes: Sequence[Outcome]) -> str:
    """Which side is wrong, and where first; and the first place where the two differ, which is a convention if both are
    right."""
    verdicts = [(side.title, outcome.verdict) for side, outcome in zip(sides, outcomes, strict=True)]
    wrong = [f"{title} ({_place(verdict)})" for title, verdict in verdicts if verdict.status != "equal"]
    parted = first_parting(*(outcome.trace for outcome in outcomes))
    titles = " | ".join(side.title for side in sides)
    if wrong:
        right = [title for title, verdict in verdicts if verdict.status == "equal"]
        rest = "; ".join(["", *(f"{title} is right" for title in right)])
        where = f" They part first at {parted} ({titles})." if parted is not None else ""
        return f"Not right: {' and '.join(wrong)}{rest}.{where}"
    if parted is None:
        return f"Both are right, and agree in every integer that both record ({titles})."
    return f"Both are right. They part first at {parted} ({titles}): a convention (docs/explanation/conventions.md)."
