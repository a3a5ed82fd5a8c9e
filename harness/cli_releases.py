"""`eagletwin releases …`: the published releases of SGLang that `--sglang` knows, and what holds on each of them."""

from typing import Annotated

import typer

from .errors import EXIT_EQUAL, InputError

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
