"""`models`: the ledger in every model: each entry proven with other targets and drafts than its own, or why it cannot be.

survey.py proves what is not known yet and keeps the answers; report.py makes a page of all that.
"""

from pathlib import Path
from typing import Annotated

import typer

from eagletwin.cases.ledger import ledger_of
from eagletwin.harness.core.errors import EXIT_EQUAL, EXIT_UNKNOWN, InputError
from eagletwin.harness.core.terminal import count, progress

from ..common import telling


def models(
    names: Annotated[list[str] | None, typer.Argument(metavar="RECIPE…", help="Models; without any, all of them.")] = None,
    entries: Annotated[
        list[str] | None, typer.Option("--entry", metavar="ENTRY", help="Prove only this entry. Repeatable.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Prove everything again.")] = False,
    write: Annotated[Path, typer.Option(help="Folder for the page, models.md, and for the answers, models.jsonl.")] = Path(
        "docs/records"
    ),
) -> int:
    """Prove every entry of the ledger in every model, where it is not known yet, and write a page.

    An interrupted run goes on where it stopped. 125 if a cell is empty, or an entry does not show and nobody knows why.
    """
    from eagletwin.harness.engines.host import Host

    from . import survey
    from .report import PAGE, open_cells, page
    from .survey import ON_SGLANG, read
    from .survey import write as write_results

    chosen = _chosen(names, ON_SGLANG)
    ledger = ledger_of(["all"])
    wanted = ledger_of(entries) if entries else ledger
    found = read(write)
    due = {model: left for model in chosen if (left := survey.due(found[model], wanted, again=again))}
    with progress("proofs", sum(map(len, due.values()))) as line:
        for model, left in due.items():
            with Host() as host:
                survey.survey(host, found[model], left, keep=lambda: write_results(write, found.values()), say=telling(line))
    known = [one for one in found.values() if one.answers]
    write.mkdir(parents=True, exist_ok=True)
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
