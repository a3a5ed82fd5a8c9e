"""`releases`: what holds on each published release of SGLang, measured on its wheel: the ledger, and greedy output.

commands/prove/proof.py starts one release after another; survey.py asks it and keeps the answers, so that
one can be asked again and nothing is asked twice; report.py makes the page of them.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from eagletwin.cases.entry import Entry, Known
from eagletwin.cases.ledger import with_probes
from eagletwin.harness.commands.info import named_releases
from eagletwin.harness.core.errors import EXIT_DIVERGED, EXIT_EQUAL, EXIT_UNKNOWN, InputError
from eagletwin.harness.core.terminal import count, progress

from ..common import telling


def releases(
    names: Annotated[list[str] | None, typer.Argument(metavar="RELEASE…", help="Releases; without any, all of them.")] = None,
    entries: Annotated[
        list[str] | None, typer.Option("--entry", metavar="ENTRY", help="Measure only this entry. Repeatable.")
    ] = None,
    model: Annotated[
        str,
        typer.Option(metavar="RECIPE", help="Measure the cases with which `models` proved the ledger in it."),
    ] = "",
    again: Annotated[bool, typer.Option("--again", help="Measure everything again.")] = False,
    records: Annotated[Path, typer.Option(metavar="FOLDER", help="With --model: the folder into which `models` wrote.")] = Path(
        "docs/records"
    ),
    write: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the pages, releases.md and report.html, and for the measurements, releases.jsonl. "
            "Default: docs/records; with --model build/records/RECIPE.",
            show_default=False,
        ),
    ] = None,
) -> int:
    """Measure the ledger and greedy output on every release, where it is not measured yet, and write a page.

    An interrupted run goes on where it stopped. 1 if greedy output differs anywhere, 125 if a cell is empty.
    """
    from eagletwin.harness.page.render import write_page

    from .report import PAGE, empty, ledger_page, page
    from .survey import common_cases, differs, fill, right_output

    ledger = _in_model(model, records) if model else [_unchanged(entry) for entry in with_probes(["all"])]
    wanted = [entry for entry in ledger if entry.id in _ids(entries)] if entries else ledger
    folder, cases = write or (Path("build/records") / model if model else Path("docs/records")), common_cases(model)
    with progress("measurements") as line:
        found = fill(folder, named_releases(names), ledger, wanted, cases, again=again, say=telling(line))
    right = right_output(cases)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PAGE).write_text(page(found, ledger, right, model), encoding="utf-8")
    print(f"{folder / PAGE} written")
    write_page(folder, lambda: ledger_page(found, ledger))
    holes = empty(found, ledger)
    if holes:
        print(f"not measured: {count(len(holes), 'cell')}, such as {holes[0]}")
    return EXIT_DIVERGED if differs(found, right) else EXIT_UNKNOWN if holes else EXIT_EQUAL


def _ids(names: list[str]) -> set[str]:
    return {entry.id for entry in with_probes(names)}


def _unchanged(entry: Known) -> Known:
    """The entry as releases are asked about it in its own model: without changes."""
    return replace(entry, beside={}) if isinstance(entry, Entry) else entry


def _in_model(model: str, folder: Path) -> list[Known]:
    """The entries that are proven in a model, with the cases that show them. Raises InputError if none is known."""
    from eagletwin.harness.families.valid import check_model

    from ..models.survey import proven_in

    check_model(model, "--model")
    found = proven_in(folder, model)
    if not found:
        raise InputError(
            f"no entry is known to be proven in {model}",
            consequence="no release was asked",
            remedy=f"python -m tests.lab models {model} --write {folder}",
        )
    return list(found)
