"""Measurements of speed, searches and reached code, printed or written."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eagletwin.cases.ledger import entries_of, patches_of
from eagletwin.harness.commands.options import CHANGES, SOURCE, run_options
from eagletwin.harness.core.errors import EXIT_DIVERGED, EXIT_EQUAL, EXIT_UNKNOWN
from eagletwin.harness.core.terminal import each, progress

from ..common import telling

if TYPE_CHECKING:
    from .report import BenchRecord


@run_options(CHANGES[1:2], SOURCE)
def rate(
    seconds: Annotated[float, typer.Option(min=1.0, help="How long to run cases.")] = 30.0,
    topk: Annotated[int, typer.Option(min=1, max=16, help="Tokens that each node of the draft tree proposes.")] = 1,
    model: Annotated[str, typer.Option(metavar="MODEL", help="A model recipe (docs/reference/case.md).")] = "llama-tiny",
    beside: Annotated[
        str, typer.Option(metavar="MODEL", help="Case by case in turn with this model. The figure is the share of its rate.")
    ] = "",
    remedy: list[str] | None = None,
    sglang: str = "",
) -> int:
    """Cases a second on one core: run, traced and judged. The last line is the figure."""
    from eagletwin.harness.engines.source import resolve
    from eagletwin.harness.families.valid import check_case

    from .report import in_turn_lines
    from .speed import in_turn, rate_case
    from .speed import rate as measure_rate

    patches = patches_of(None, remedy, None)
    for name, option in ((model, "--model"), *([(beside, "--beside")] if beside else [])):
        check_case(rate_case(0, topk, name), option)
    if beside:
        own, other = in_turn(seconds, topk, model, beside, patches, resolve(sglang))
        print(*in_turn_lines(model, beside, own, other), sep="\n")
        return EXIT_EQUAL
    found = measure_rate(seconds, topk, resolve(sglang), model, patches)
    print(f"{found.cases} cases in {found.seconds:.1f} s, run, traced and judged")
    print(f"{found.per_second:.2f} cases/s/core")
    return EXIT_EQUAL


Folder = Annotated[
    Path | None,
    typer.Option("--write", help="Folder for benchmarks.json and .md. Parts that are already there are kept."),
]
Entries = Annotated[list[str] | None, typer.Option("--entry", help="Search for this entry of the ledger only. Repeatable.")]
Seeds = Annotated[int, typer.Option(min=1, help="Searches for each entry of the ledger.")]
AtOnce = Annotated[int, typer.Option("--at-once", min=1, help="Entries that are searched for at the same time.")]
Processes = Annotated[int, typer.Option("-n", metavar="N", min=1, help="Processes of each search, a core each.")]
Missing = Annotated[bool, typer.Option("--missing", help="Measure only what the folder does not have yet.")]


def speed(write: Folder = None) -> int:
    """Rates, start-up and growth with size. Run it on an idle machine."""
    from .report import page

    record = _speed(_so_far(write), write)
    print(page(record))
    return EXIT_EQUAL


def search(
    entry: Entries = None,
    seeds: Seeds = 10,
    missing: Missing = False,
    at_once: AtOnce = 1,
    processes: Processes = 2,
    write: Folder = None,
) -> int:
    """Measure how soon `fuzz` finds each bug of the ledger, and how small. 1 if a search found nothing.

    An interrupted run keeps what it has measured."""
    from eagletwin.cases.ledger import LEDGER

    from .report import search_lines
    from .searches import why_not

    record = _so_far(write)
    entries = [one for name in entry for one in entries_of(name)] if entry else list(LEDGER.values())
    for one in entries:
        if why_not(one):
            print(f"not searched for: {why_not(one)}", file=sys.stderr)
    names = [one.id for one in entries if not why_not(one)]
    wanted = [name for name in names if not (missing and name in record.searches)]
    record = _search(record, wanted, seeds, at_once, processes, write)
    found = [record.searches[name].searched for name in wanted]
    print(*search_lines(found), sep="\n")
    if any(len(one.found) < seeds for one in found):
        return EXIT_DIVERGED
    return EXIT_UNKNOWN if entry and len(names) < len(entries) else EXIT_EQUAL


@run_options(SOURCE)
def reached(
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of a default search.")] = 35,
    seed: Annotated[int, typer.Option(min=0, help="Of the search.")] = 0,
    never: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a line for each branch that no case ran.")] = None,
    sglang: str = "",
) -> int:
    """Which branches of SGLang's speculative workers the equal cases of a search and their engines run, and how soon."""
    from eagletwin.cases.blocks import LONG
    from eagletwin.harness.engines.source import resolve

    from ..mutants.corpus import gather
    from .reached import ReachedCode, branches_of, lines_of

    source = resolve(sglang)
    reached = ReachedCode(branches_of(source)).count(gather(source, seed, blocks, 0, LONG, modules=()))
    if never is not None:
        never.write_text("\n".join([*reached.never(), ""]), encoding="utf-8")
    print(*lines_of(reached), sep="\n")
    return EXIT_EQUAL


def _so_far(folder: Path | None) -> "BenchRecord":
    """What the folder has figures of already."""
    from .report import BenchRecord, read_record

    return read_record(folder) if folder else BenchRecord()


def _speed(record: "BenchRecord", folder: Path | None) -> "BenchRecord":
    from msgspec.structs import replace

    from . import speed as measure
    from .report import Speed, stamp

    rounds = [{topk: measure.rate(10, topk).per_second for topk in (1, 3)} for _ in each(range(9), "rounds of rates")]
    alone, together = measure.parallel(10, 3)
    speed = Speed(
        stamp=stamp(),
        rates={topk: measure.spread([found[topk] for found in rounds]) for topk in (1, 3)},
        shares={topk: measure.share(100, topk) for topk in (1, 3)},
        steps={topk: measure.step(7, topk) for topk in (1, 3)},
        alone=alone,
        together=together,
        start=measure.start(9),
        build=measure.build(7),
        growth=measure.growth(5),
    )
    return _kept(replace(record, speed=speed), folder)


def _search(
    record: "BenchRecord", names: list[str], seeds: int, at_once: int, processes: int, folder: Path | None
) -> "BenchRecord":
    """Search for the entries; each is kept as soon as it is done."""
    from msgspec.structs import replace

    from eagletwin.cases.ledger import LEDGER

    from .report import Search, stamp
    from .searches import search_all

    with progress("entries", len(names)) as line:
        for one in search_all([LEDGER[name] for name in names], seeds, at_once, processes):
            search = Search(stamp(), at_once, one, processes)
            record = _kept(replace(record, searches=record.searches | {one.entry: search}), folder)
            telling(line)(f"{one.entry}: {len(one.found)} of {one.seeds}")
    return record


def _kept(record: "BenchRecord", folder: Path | None) -> "BenchRecord":
    """The record, written down with its page."""
    from .report import PAGE, page, write_record

    if folder:
        write_record(folder, record)
        (folder / PAGE).write_text(page(record), encoding="utf-8")
    return record
