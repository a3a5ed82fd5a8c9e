"""`eagletwin check CASE`: run one case on one engine, and judge it."""

from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from eagletwin.cases.ledger import case_of, find_entry
from eagletwin.cases.reach import unreached_text, why_unreachable
from eagletwin.harness.core.case import ModelRunner
from eagletwin.harness.core.errors import EXIT_UNKNOWN, InputError
from eagletwin.harness.core.run_spec import ENGINES, RunSpec
from eagletwin.harness.core.terminal import show, width

from .options import (
    CHANGES,
    ENGINE,
    HOW,
    JUDGING,
    LIMITS,
    OUT,
    REPEAT,
    SOURCE,
    STRICT,
    WHICH,
    WHICH_TEXT,
    Names,
    nothing_run,
    option,
    run_options,
)
from .result import emit_result, with_json

if TYPE_CHECKING:
    from eagletwin.harness.core.case import Case
    from eagletwin.harness.engines.start import Zygote


# Typer reads no list of a Literal.
_Engine = Enum("_Engine", {engine: engine for engine in ENGINES})  # type: ignore[misc]
EACH = option(ENGINE, "engines", list[_Engine] | None, None, "ENGINE", "--engine", show_default=False)(
    f"{WHICH_TEXT} Give both, and both run the case, and the report says where they part."
)
_Runner = Enum("_Runner", {runner: runner for runner in get_args(ModelRunner)})  # type: ignore[misc]
RUNNERS = option(ENGINE, "runners", list[_Runner] | None, None, "RUNNER", "--model-runner", show_default=False)(
    "The model runner of vLLM, in the place of the case's: `v1` or `v2`. Give both, and both run the case, and the report says "
    "where they part."
)
AFTER = option(ENGINE, "after", Names, None, "CASE")(
    "First run this case in the same process, to repeat a state leak between cases. Repeatable."
)


@with_json
@run_options((AFTER, OUT), CHANGES, JUDGING, STRICT, REPEAT, SOURCE, (EACH, *WHICH[1:], RUNNERS), HOW, LIMITS)
def check(
    case: Annotated[str, typer.Argument(help="A case file (JSON), or the id of a ledger entry such as 25015.")],
    *,
    after: list[str] | None,
    engines: list[Enum] | None,
    runners: list[Enum] | None,
    out: Path,
    spec: RunSpec,
) -> int:
    """Run one case on one engine, or on two of them, and judge it."""
    from eagletwin.harness.engines.source import resolve
    from eagletwin.harness.engines.start import Zygote

    chosen, before = case_of(case), _before(case, after or ())
    several, named = len(set(engines or ())) > 1, [*dict.fromkeys(runner.value for runner in runners or ())]
    if several and named:
        raise nothing_run(f"--model-runner {named[0]} with two engines: each runs the case's own", "give one --engine with it")
    if several or len(named) > 1:
        from .both import both_engines, both_runners, run_on_both

        return run_on_both((both_engines if several else both_runners)(case, chosen, spec), before, out)
    if named:
        from .both import on_runner

        chosen, before = on_runner(chosen, named[0]), tuple(on_runner(one, named[0]) for one in before)
    entry = find_entry(case)
    if entry is not None and why_unreachable(entry, spec.mode):
        # the case would be equal in this mode, and that says nothing about the bug that was named
        print(unreached_text(entry, spec.mode))
        return EXIT_UNKNOWN
    words = [*(("--after", name) for name in after or ()), *(("--model-runner", name) for name in named)]
    again = spec.command("check", case, *(part for pair in words for part in pair))
    with Zygote(resolve(spec.release, spec.mode.engine), spec.mode) as zygote:
        zygote.start()  # it imports the engine while this process imports torch
        return _run(zygote, chosen, before, out, spec, again)


def _before(case: str, after: Sequence[str]) -> "tuple[Case, ...]":
    """The cases to run before it. Raises InputError for one that cannot run in the same process."""
    chosen, before = case_of(case), tuple(case_of(name) for name in after)
    for name, one in zip(after, before, strict=True):
        if one.configuration() != chosen.configuration():
            raise InputError(
                f"{name} needs another engine configuration than {case}",
                consequence="nothing was run: the two cannot run in one process",
                remedy="give both the same model, num_steps, page_size, chunked_prefill_size and engine settings",
            )
    return before


def _run(zygote: "Zygote", case: "Case", before: "tuple[Case, ...]", out: Path, spec: RunSpec, again: str) -> int:
    from eagletwin.harness.engines.host import Host

    from .both import run_facts
    from .matrix import Matrix, Question

    script = None if before else spec  # a script holds one case
    question = Question(what=case, name=case.name, out=out, run=spec, again=again, after=before, script=script, known=True)
    with Host(zygote) as host:
        cell = Matrix().ask(host, question)
    if (outcome := cell.run) is None:
        print(f"UNKNOWN  {case.name}\n\n  {cell.error}")
        return EXIT_UNKNOWN
    show(outcome.text(width()))
    print(f"  folder: {outcome.folder}")
    emit_result(run_facts(outcome))
    return spec.exit_code(outcome.verdict)
