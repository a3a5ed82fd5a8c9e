"""`eagletwin info releases …`: the published releases of SGLang that `--sglang` accepts."""

from typing import Annotated

import typer

from eagletwin.harness.core.errors import EXIT_EQUAL, InputError
from eagletwin.harness.core.terminal import each

from .as_json import tell_result, with_json
from .result import ReleaseFacts, ReleasesFacts

releases = typer.Typer(add_completion=False, help="The published releases of SGLang.")


@releases.command("list")
@with_json
def releases_list() -> int:
    """List the releases that `--sglang` accepts, and which of them are in the cache. Fetches nothing."""
    from eagletwin.harness.engines.provision import releases as known
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
    from eagletwin.harness.engines.provision import releases as known

    for name in names or ():
        if name not in known():
            raise InputError(
                f"{name!r} is not a known release", consequence="nothing was done", remedy=f"use some of {', '.join(known())}"
            )
    return [name for name in known() if name in names] if names else list(known())
