"""`eagletwin check CASE --engine sglang --engine vllm`: one case, one checkpoint, one reference, two verdicts."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import get_args

from eagletwin.harness.check.confirm import Outcome, brief
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.errors import EXIT_UNKNOWN
from eagletwin.harness.core.run_spec import Engine, RunSpec
from eagletwin.harness.core.terminal import show
from eagletwin.harness.engines.host import Host
from eagletwin.harness.engines.source import resolve
from eagletwin.harness.families.valid import not_driven
from eagletwin.harness.judge.engines import first_parting

from .matrix import Matrix, Question, run_facts
from .options import nothing_run, on_engine
from .prove.proof import worst
from .result import BothFacts, emit_result


def run_on_both(name: str, case: Case, before: Sequence[Case], out: Path, spec: RunSpec) -> int:
    """Run a case on each engine, as it is released, and say where the two part. Raises InputError for a case that one of them
    does not run."""
    runs = [on_engine(spec, engine) for engine in get_args(Engine)]
    for run in runs:
        if why := not_driven(case, run.mode):
            raise nothing_run(f"{case.name} on both engines: {why}", "give one --engine, or a case that both run")
    matrix, outcomes = Matrix(), list[Outcome]()
    with ExitStack() as stack:
        for run in runs:
            host = stack.enter_context(Host(source=resolve("", run.mode.engine), mode=run.mode))
            title, again = f"{case.name}-{run.mode.engine}", run.command("check", name)
            question = Question(what=case, name=title, out=out, run=run, again=again, after=tuple(before), known=True)
            cell = matrix.ask(host, question)
            if (outcome := cell.run) is None:
                print(f"UNKNOWN  {case.name} on {run.mode.title}\n\n  {cell.error}")
                return EXIT_UNKNOWN
            outcomes.append(outcome)
    code = worst([spec.exit_code(outcome.verdict) for outcome in outcomes])
    again = " ".join((runs[0].command("check", name), *(f"--engine {run.mode.engine}" for run in runs)))
    lines = [f"{_line(run, outcome)}\n  folder: {outcome.folder}" for run, outcome in zip(runs, outcomes, strict=True)]
    parting = _parting(runs, outcomes)
    show("\n".join([*lines, "", f"  {parting}", "", f"  again: {again}"]))
    emit_result(BothFacts(runs=[run_facts(outcome) for outcome in outcomes], parting=parting, again=again))
    return code


def _line(run: RunSpec, outcome: Outcome) -> str:
    verdict = outcome.verdict
    what = "" if verdict.status == "equal" else f": {brief(verdict)}"
    return f"{verdict.status.upper()}  {outcome.case.name} on {run.mode.title} {outcome.trace.header.engine.version}{what}"


def _parting(runs: Sequence[RunSpec], outcomes: Sequence[Outcome]) -> str:
    """Which engine is wrong, and where first; if none is, the first place where they differ, which is a convention."""
    wrong = [(run.mode.title, outcome.verdict) for run, outcome in zip(runs, outcomes, strict=True)]
    wrong = [(title, verdict) for title, verdict in wrong if verdict.status != "equal"]
    if wrong:
        places = (f"request {v.first.request}, {brief(v)}" if v.first else brief(v) for _, v in wrong)
        named = (f"{title} ({place})" for (title, _), place in zip(wrong, places, strict=True))
        rest = "" if len(wrong) > 1 else f"; {next(run.mode.title for run in runs if run.mode.title != wrong[0][0])} is right"
        return f"Not right: {' and '.join(named)}{rest}."
    parted = first_parting(*(outcome.trace for outcome in outcomes))
    titles = " | ".join(run.mode.title for run in runs)
    if parted is None:
        return f"Both are right, and agree in every integer that both record ({titles})."
    return f"Both are right. They part first at {parted} ({titles}): a convention (docs/explanation/conventions.md)."
