"""`eagletwin releases …`: the published releases of SGLang that `--sglang` knows, and what holds on each of them."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .cli_options import tell, with_probes
from .errors import EXIT_DIVERGED, EXIT_EQUAL, EXIT_UNKNOWN, InputError
from .words import count

if TYPE_CHECKING:
    from .engines.wire import Kernels

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
    found = fill(write, chosen(names), ledger, wanted, again=again, say=tell)
    right = right_output()
    (write / PAGE).write_text(page(found, ledger, right), encoding="utf-8")
    print(f"{write / PAGE} written")
    holes = empty(found, ledger)
    if holes:
        print(f"not measured: {count(len(holes), 'cell')}, such as {holes[0]}")
    return EXIT_DIVERGED if differs(found, right) else EXIT_UNKNOWN if holes else EXIT_EQUAL


def prove_on_wheels(entries: list[str], kernels: "Kernels", out: Path, step_timeout: float, case_timeout: float) -> int:
    """What `prove --releases` does."""
    from . import prove as proving
    from .engines.process import Limits
    from .report.table import proof_title, wheel_proof_table

    begun = time.monotonic()
    chosen = [entry for entry in with_probes(entries) if entry.fixed]
    proofs = []
    for proof in proving.prove_on_wheels(chosen, out, Limits(step=step_timeout, case=case_timeout), kernels, tell):
        proofs.append(proof)
        print(proof_title(proof.entry))
        for seen in (proof.bad, proof.good):
            if seen is not None:
                print(seen.text)
        if proof.why:
            print(f"UNKNOWN  {proof.why}\n")
    wheel_proof_table(proofs)
    print(f"{sum(proof.holds for proof in proofs)} of {len(proofs)} proven in {time.monotonic() - begun:.1f} s")
    return proving.worst([proof.exit_code for proof in proofs])
