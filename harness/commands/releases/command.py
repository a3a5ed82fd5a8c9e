"""`eagletwin releases …`: the published releases of SGLang that `--sglang` knows, and what holds on each of them."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from eagletwin.cases.entry import Entry, Known
from eagletwin.cases.ledger import with_probes
from eagletwin.harness.core.errors import EXIT_DIVERGED, EXIT_EQUAL, EXIT_UNKNOWN, InputError
from eagletwin.harness.core.progress import each, progress
from eagletwin.harness.core.words import count

from ..as_json import tell_result, with_json
from ..options import telling
from ..result import ReleaseFacts, ReleasesFacts, WrittenFacts

releases = typer.Typer(add_completion=False, help="The published releases of SGLang, and the ledger on each of them.")


@releases.command("list")
@with_json
def releases_list() -> int:
    """List the releases that `--sglang` accepts, and which of them are in the cache. Fetches nothing."""
    from eagletwin.harness.engines.lock import releases as known
    from eagletwin.harness.engines.source import here

    there = here()
    for name in known():
        print(f"{name:14} {'here' if name in there else 'to be fetched'}")
    tell_result(ReleasesFacts(releases=[ReleaseFacts(name=name, here=name in there) for name in known()]))
    return EXIT_EQUAL


@releases.command("fetch")
@with_json
def releases_fetch(
    names: Annotated[list[str] | None, typer.Argument(metavar="RELEASE…", help="Releases; without any, all of them.")] = None,
) -> int:
    """Fetch releases, and the packages that they pin, into the cache: for work without a network."""
    from eagletwin.harness.engines.source import resolve

    fetched = []
    for name in each(chosen(names), "releases", str):
        paths = [str(path) for path in resolve(name).paths]
        fetched.append(ReleaseFacts(name=name, here=True, paths=paths))
        print(f"{name:14} {', '.join(paths) or 'installed'}", flush=True)
    tell_result(ReleasesFacts(releases=fetched))
    return EXIT_EQUAL


def chosen(names: list[str] | None) -> list[str]:
    """The releases of these names; all of them if no name is given. Raises InputError for an unknown release."""
    from eagletwin.harness.engines.lock import releases as known

    for name in names or ():
        if name not in known():
            raise InputError(
                f"{name!r} is not a known release", consequence="nothing was done", remedy=f"use some of {', '.join(known())}"
            )
    return [name for name in known() if name in names] if names else list(known())


@releases.command("table")
@with_json
def releases_table(
    names: Annotated[list[str] | None, typer.Argument(metavar="RELEASE…", help="Releases; without any, all of them.")] = None,
    entries: Annotated[
        list[str] | None, typer.Option("--entry", metavar="ENTRY", help="Measure only this entry. Repeatable.")
    ] = None,
    model: Annotated[
        str,
        typer.Option(metavar="RECIPE", help="Measure the cases with which `eagletwin models table` proved the ledger in it."),
    ] = "",
    again: Annotated[bool, typer.Option("--again", help="Measure everything again.")] = False,
    records: Annotated[
        Path, typer.Option(metavar="FOLDER", help="With --model: the folder into which `models table` wrote.")
    ] = Path("docs/records"),
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
    from eagletwin.cases.common import common_cases
    from eagletwin.harness.page.render import write_page

    from .page import ledger_page
    from .report import PAGE, empty, page
    from .table import differs, fill, right_output

    ledger = _in_model(model, records) if model else [_unchanged(entry) for entry in with_probes(["all"])]
    wanted = [entry for entry in ledger if entry.id in _ids(entries)] if entries else ledger
    folder, cases = write or (Path("build/records") / model if model else Path("docs/records")), common_cases(model)
    with progress("measurements") as line:
        found = fill(folder, chosen(names), ledger, wanted, cases, again=again, say=telling(line))
    right = right_output(cases)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PAGE).write_text(page(found, ledger, right, model), encoding="utf-8")
    print(f"{folder / PAGE} written")
    write_page(folder, lambda: ledger_page(found, ledger))
    holes = empty(found, ledger)
    _tell_written(folder, holes)
    return EXIT_DIVERGED if differs(found, right) else EXIT_UNKNOWN if holes else EXIT_EQUAL


def _tell_written(folder: Path, holes: list[str]) -> None:
    """What was written, and what is missing in it."""
    from .report import PAGE
    from .results import FILE

    if holes:
        print(f"not measured: {count(len(holes), 'cell')}, such as {holes[0]}")
    files = {"page": str(folder / PAGE), "measurements": str(folder / FILE)}
    tell_result(WrittenFacts(files=files, said=[f"not measured: {hole}" for hole in holes]))


def _ids(names: list[str]) -> set[str]:
    return {entry.id for entry in with_probes(names)}


def _unchanged(entry: Known) -> Known:
    """The entry as releases are asked about it in its own model: without changes."""
    return replace(entry, beside={}) if isinstance(entry, Entry) else entry


def _in_model(model: str, folder: Path) -> list[Known]:
    """The entries that are proven in a model, with the cases that show them. Raises InputError if none is known."""
    from eagletwin.harness.families.valid import check_model

    from ..models.results import proven_in

    check_model(model, "--model")
    found = proven_in(folder, model)
    if not found:
        raise InputError(
            f"no entry is known to be proven in {model}",
            consequence="no release was asked",
            remedy=f"eagletwin models table {model} --write {folder}",
        )
    return list(found)
