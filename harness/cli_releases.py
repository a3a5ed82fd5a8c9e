"""`eagletwin releases …`: the published releases of SGLang that `--sglang` knows, and what holds on each of them."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from .cli_options import with_probes
from .errors import EXIT_DIVERGED, EXIT_EQUAL, EXIT_UNKNOWN, InputError

releases = typer.Typer(add_completion=False, help="The published releases of SGLang, and what holds on each of them.")


@releases.command("list")
def releases_list() -> int:
    """The releases that `--sglang` knows, and which of them are here. Fetches nothing."""
    from .engines.lock import releases as known
    from .engines.source import here

    there = here()
    for name in known():
        print(f"{name:14} {'here' if name in there else 'to be fetched'}")
    return EXIT_EQUAL


@releases.command("fetch")
def releases_fetch(
    names: Annotated[list[str] | None, typer.Argument(metavar="RELEASE…", help="Releases; without any, all of them.")] = None,
) -> int:
    """Fetch releases and the packages that they pin into the cache, for a machine that will have no network."""
    from .engines.source import resolve

    for name in chosen(names):
        print(f"{name:14} {', '.join(map(str, resolve(name).paths)) or 'installed'}", flush=True)
    return EXIT_EQUAL


def chosen(names: list[str] | None) -> list[str]:
    """The releases of these names, all of them if there is none. Raises InputError for what is no release."""
    from .engines.lock import releases as known

    for name in names or ():
        if name not in known():
            raise InputError(
                f"{name!r} is no known release", consequence="nothing was done", remedy=f"use some of {', '.join(known())}"
            )
    return [name for name in known() if name in names] if names else list(known())


@releases.command("table")
def releases_table(
    names: Annotated[list[str] | None, typer.Argument(metavar="RELEASE…", help="Measure these; without any, all.")] = None,
    entries: Annotated[
        list[str] | None, typer.Option("--entry", metavar="ENTRY", help="Measure only this entry. Repeatable.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure also what is known.")] = False,
    write: Annotated[Path, typer.Option(help="Folder for releases.md, and for what was measured, releases/*.json.")] = Path(
        "docs"
    ),
) -> int:
    """The ledger on every release, and greedy output: measured where it is not known yet, and written as a page.

    Stopped half way, it goes on from there. 1 if greedy output differs anywhere, 125 if a cell is empty.
    """
    from .releases.table import differs, fill, right_output
    from .report.releases import PAGE, empty, page

    ledger = with_probes(["all"])
    wanted = with_probes(entries) if entries else ledger
    found = fill(write, chosen(names), ledger, wanted, again=again, say=lambda text: print(text, file=sys.stderr, flush=True))
    right = right_output()
    (write / PAGE).write_text(page(found, ledger, right), encoding="utf-8")
    print(f"{write / PAGE} written")
    holes = empty(found, ledger)
    if holes:
        print(f"{len(holes)} cells are not measured, such as {holes[0]}")
    return EXIT_DIVERGED if differs(found, right) else EXIT_UNKNOWN if holes else EXIT_EQUAL
