"""`eagletwin releases …`: the published releases of SGLang that `--sglang` knows, and what holds on each of them."""

from pathlib import Path
from typing import Annotated

import typer

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
    again: Annotated[bool, typer.Option("--again", help="Measure everything again.")] = False,
    write: Annotated[
        Path, typer.Option(help="Folder for the pages, releases.md and report.html, and for the measurements, data/*.json.")
    ] = Path("docs/records"),
) -> int:
    """Measure the ledger and greedy output on every release, where it is not measured yet, and write a page.

    An interrupted run goes on where it stopped. 1 if greedy output differs anywhere, 125 if a cell is empty.
    """
    from eagletwin.harness.page.render import write_page

    from .page import ledger_page
    from .report import PAGE, empty, page
    from .results import FOLDER
    from .table import differs, fill, right_output

    ledger = with_probes(["all"])
    wanted = with_probes(entries) if entries else ledger
    with progress("measurements") as line:
        found = fill(write, chosen(names), ledger, wanted, again=again, say=telling(line))
    right = right_output()
    (write / PAGE).write_text(page(found, ledger, right), encoding="utf-8")
    print(f"{write / PAGE} written")
    write_page(write, lambda: ledger_page(found, ledger))
    holes = empty(found, ledger)
    if holes:
        print(f"not measured: {count(len(holes), 'cell')}, such as {holes[0]}")
    tell_result(
        WrittenFacts(
            files={"page": str(write / PAGE), "measurements": str(write / FOLDER)},
            said=[f"not measured: {hole}" for hole in holes],
        )
    )
    return EXIT_DIVERGED if differs(found, right) else EXIT_UNKNOWN if holes else EXIT_EQUAL
