"""`eagletwin info ledger`: which bugs are known, since when, and for whom they matter."""

import json
from typing import Annotated, Any

import typer

from eagletwin.cases.entry import Entry, Known
from eagletwin.harness.core.errors import EXIT_EQUAL, InputError
from eagletwin.harness.core.terminal import count


def ledger(
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="[ID]…", help="These entries alone, with all that is known.")
    ] = None,
    live: Annotated[bool, typer.Option("--live", help="Only bugs that no release has fixed.")] = False,
    release: Annotated[str, typer.Option("--in", metavar="RELEASE", help="Only bugs of this release.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> int:
    """List the known bugs: id, releases that have it, what a run needs for it to matter."""
    from eagletwin.cases.ledger import with_probes

    chosen = [entry for entry in with_probes(ids or ["all"]) if not (live and entry.fixed)]
    if release:
        _must_be_known(release)
        chosen = [entry for entry in chosen if entry.is_in(release)]
    if as_json:
        print(json.dumps([facts(entry) for entry in chosen], indent=1))
        return EXIT_EQUAL
    for entry in chosen:
        print(full_text(entry) if ids else short_text(entry))
    print(f"\n{count(len(chosen), 'bug')}; `eagletwin info ledger ID` says more of one, `eagletwin prove ID` proves it.")
    return EXIT_EQUAL


def _must_be_known(release: str) -> None:
    """Raises InputError for a release that eagletwin does not know."""
    from eagletwin.harness.engines.provision import releases

    order = releases()
    if release not in order:
        raise InputError(
            f"{release!r} is not a known release", consequence="nothing was listed", remedy=f"use one of {', '.join(order)}"
        )


def facts(entry: Known) -> dict[str, Any]:
    """All that is known of it, for programs."""
    found: dict[str, Any] = {
        "id": entry.id,
        "title": entry.title,
        "rule": entry.rule,
        "buggy": entry.buggy,
        "fixed": entry.fixed,
        "live": not entry.fixed,
        "last_bad": entry.last_bad,
        "hidden": entry.hidden,
        "matters_with": entry.trigger,
    }
    if isinstance(entry, Entry):
        sides = {"revert": entry.revert, "remedy": entry.remedy, "view": entry.view}
        found["told_apart_by"] = next(name for name, part in sides.items() if part is not None)
        found["needs"] = entry.needs.options if entry.needs is not None else ""
    else:
        found["told_apart_by"] = "call"
        found["needs"] = ""  # a call of one function needs no mode
    return found


def short_text(entry: Known) -> str:
    return f"{entry.id:26} {entry.state:24} {entry.rule:20} {entry.title}"


def full_text(entry: Known) -> str:
    """The entry, and what to type."""
    lines = [f"{entry.id}: {entry.title}", f"  releases      {entry.state}", f"  breaks        {entry.rule}"]
    lines.append(f"  matters with  {entry.trigger}")
    if not isinstance(entry, Entry):
        return "\n".join([*lines, f"  try           {entry.command}", ""])
    needs = f" {entry.needs.options}" if entry.needs is not None else ""
    lines += [f"  try           {entry.command(entry.red)}{needs}", f"                eagletwin prove {entry.id}{needs}", ""]
    return "\n".join(lines)
