"""`eagletwin compare BASE HEAD`: what a pull request of SGLang breaks, fixes and leaves, as a comment for it."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from eagletwin.cases.reach import unreached, unreached_text
from eagletwin.harness.core.errors import EXIT_UNKNOWN, InputError
from eagletwin.harness.core.run_spec import RunSpec, exact, unusual
from eagletwin.harness.core.terminal import show, width

from ..options import DEFAULT_RUNS, OUTPUT, Runs
from ..run_options import HOW, LIMITS, run_options

if TYPE_CHECKING:
    from .report import Comparing

CASES, MINUTES = 40, 15.0


@run_options(HOW, LIMITS)
def compare(
    base: Annotated[str, typer.Argument(metavar="BASE", help="What the change was made from: a release, or a source tree.")],
    head: Annotated[str, typer.Argument(metavar="HEAD", help="The change: a release, or a source tree.")],
    cases: Annotated[int, typer.Option(metavar="N", min=0, help="How many generated cases run on both sides.")] = CASES,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="The same seed draws the same cases.")] = 0,
    ledger: Annotated[
        list[str] | None,
        typer.Option(
            metavar="none|all|ID",
            help="Entries of the ledger that run on both sides: `all` that the mode reaches, `none`, or these. Repeatable. "
            "Default: all.",
            show_default=False,
        ),
    ] = None,
    minutes: Annotated[
        float,
        typer.Option(
            metavar="MINUTES",
            min=0.01,
            help="Begin no further case after this time, the import of both SGLangs included.",
        ),
    ] = MINUTES,
    markdown: Annotated[
        bool, typer.Option("--markdown", rich_help_panel=OUTPUT, help="Print a comment for the pull request, in Markdown.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", rich_help_panel=OUTPUT, help="Print JSON, for programs.")] = False,
    out: Runs = DEFAULT_RUNS,
    *,
    spec: RunSpec,
) -> int:
    """Compare a pull request of SGLang with its base: what it breaks, what it fixes, and what it does to acceptance.

    The same generated cases and entries of the ledger run on both, unchanged. Exit codes: 1 something is newly broken; 125 it
    cannot be told: none of the changed functions ran, or a side could not run; 0 otherwise.
    """
    if markdown and as_json:
        raise InputError("--markdown and --json", consequence="nothing was run", remedy="leave out either")
    from .asking import Asking
    from .questions import asked_of_ledger, entries_named, generated

    entries = entries_named(ledger or ["all"])
    beyond = [entry for entry in entries if unreached(entry, spec.mode)]
    if beyond and "all" not in (ledger or ["all"]):
        print("".join(unreached_text(entry, spec.mode) for entry in beyond), end="")
        return EXIT_UNKNOWN
    own = unusual((("--cases", cases, CASES), ("--seed", seed, 0), ("--minutes", exact(minutes), exact(MINUTES))))
    words = [*own, *(word for name in ledger or () for word in ("--ledger", name))]
    questions = [*generated(cases, seed, spec.mode), *asked_of_ledger(entries, spec.mode)]
    if not questions:
        raise InputError(
            "--cases 0 and no entry of the ledger", consequence="nothing was run", remedy="give either, or leave both out"
        )
    asking = Asking(
        names=(base, head),
        questions=questions,
        seconds=60 * minutes,
        command=spec.command("compare", base, head, *words, *["--markdown"] * markdown, *["--json"] * as_json),
        unreached=tuple(entry.id for entry in beyond),
        run=spec,
        out=out,
    )
    return asking.report(lambda one: _print(one, markdown=markdown, as_json=as_json))


def _print(one: "Comparing", *, markdown: bool, as_json: bool) -> None:
    from .markdown import markdown_of
    from .report import facts_of, text_of

    if as_json:
        print(json.dumps(facts_of(one), indent=1))
    elif markdown:
        print(markdown_of(one))
    else:
        show(text_of(one, width()))
