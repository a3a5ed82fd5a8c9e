"""`eagletwin models …`: which model recipes there are, and the ledger in each of them."""

from pathlib import Path
from typing import Annotated

import typer

from eagletwin.cases.ledger import ledger_of
from eagletwin.harness.core.errors import EXIT_EQUAL, EXIT_UNKNOWN, InputError
from eagletwin.harness.core.words import count

from ..options import tell

models = typer.Typer(add_completion=False, invoke_without_command=True)


@models.callback()
def models_list(
    context: typer.Context, as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False
) -> int:
    """List the model recipes: tiny, synthetic target / draft pairs, one family a block. `table`: the ledger in each of them."""
    from .listing import list_models

    return EXIT_EQUAL if context.invoked_subcommand else list_models(as_json=as_json)


@models.command("table")
def models_table(
    names: Annotated[list[str] | None, typer.Argument(metavar="RECIPE…", help="Models; without any, all of them.")] = None,
    entries: Annotated[
        list[str] | None, typer.Option("--entry", metavar="ENTRY", help="Prove only this entry. Repeatable.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Prove everything again.")] = False,
    write: Annotated[
        Path, typer.Option(help="Folder for the page, models.md, and for the answers, data/models/*.json.")
    ] = Path("docs/records"),
) -> int:
    """Prove every entry of the ledger in every model, where it is not known yet, and write a page.

    An interrupted run goes on where it stopped. 125 if a cell is empty, or an entry does not show and nobody knows why.
    """
    from eagletwin.harness.engines.host import Host
    from eagletwin.harness.families import RECIPES

    from . import results, survey
    from .report import PAGE, open_cells, page

    chosen = _chosen(names, list(RECIPES))
    ledger = ledger_of(["all"])
    wanted = ledger_of(entries) if entries else ledger
    found = {model: results.read(write, model) for model in RECIPES}
    for model in chosen:
        due = survey.due(found[model], wanted, again=again)
        if not due:
            continue
        with Host() as host:
            survey.survey(host, found[model], due, keep=lambda one: results.write(write, one), say=tell)
    known = [one for one in found.values() if one.answers]
    (write / PAGE).write_text(page(known, ledger), encoding="utf-8")
    print(f"{write / PAGE} written")
    holes = open_cells(list(found.values()), ledger)
    if holes:
        print(f"open: {count(len(holes), 'cell')}, such as {holes[0]}")
    return EXIT_UNKNOWN if holes else EXIT_EQUAL


def _chosen(names: list[str] | None, known: list[str]) -> list[str]:
    """The models of these names; all of them if no name is given. Raises InputError."""
    for name in names or ():
        if name not in known:
            raise InputError(
                f"no model recipe is called {name!r}",
                consequence="nothing was proven",
                remedy=f"use some of {', '.join(known)}",
            )
    return [name for name in known if name in names] if names else known
