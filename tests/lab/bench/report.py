"""What the benchmark has measured, as JSON and as a page."""

import datetime
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import msgspec
from msgspec import Struct

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.files import installed_version

from .searches import GIVE_UP, SECONDS, SHRINK_SECONDS, Searched, why_not
from .speed import Share, Spread, StepTimes, spread

# What the benchmark has measured so far, kept as JSON next to its page: each part with its day and its machine.
#
# The page is written from it (report.py), so that it can be completed part by part, on a machine that is quiet for a
# few minutes at a time, and no part takes another's date.

RECORD = "benchmarks.json"


class Stamp(Struct, frozen=True):
    """When and on what a part was measured."""

    date: str
    machine: str
    versions: str


class Speed(Struct, frozen=True):
    """By topk cases/s, what of a case is trace and judge, and a decode step in both runtimes; cases/s of one process and of two
    at once; seconds from the shell to the verdict, until another engine stands, and of a case by what grows and its size.
    """

    stamp: Stamp
    rates: dict[int, Spread]
    shares: dict[int, Share]
    steps: dict[int, StepTimes]
    alone: Spread
    together: Spread
    start: Spread
    growth: dict[str, dict[int, Spread]]
    build: Spread | None = None  # not measured yet


class Search(Struct, frozen=True):
    """The searches for one entry. at_once: how many entries were searched for at a time; processes: of each search."""

    stamp: Stamp
    at_once: int
    searched: Searched
    processes: int = 1


class BenchRecord(Struct, frozen=True):
    """All parts: speed, and the searches by entry. What is absent was not measured yet."""

    speed: Speed | None = None
    searches: dict[str, Search] = {}


def read_record(folder: Path) -> BenchRecord:
    """The record in a folder; empty if the folder has no record."""
    path = folder / RECORD
    try:
        return msgspec.json.decode(path.read_bytes(), type=BenchRecord)
    except FileNotFoundError:
        return BenchRecord()
    except msgspec.DecodeError as error:
        raise InputError(
            f"{path}: {error}", consequence="nothing was measured: it would have been written over", remedy="move it away"
        ) from error


def write_record(folder: Path, record: BenchRecord) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(record)) + b"\n")


def stamp() -> Stamp:
    """Of this day and machine."""
    machine = f"{platform.machine()}, {os.cpu_count()} cores ({_processor()}), {platform.system()}"
    versions = ", ".join(f"{name} {installed_version(name)}" for name in ("sglang", "torch", "triton"))
    return Stamp(datetime.date.today().isoformat(), machine, f"Python {platform.python_version()}, {versions}")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


# The benchmark as a page.

PAGE = "benchmarks.md"
_LIMITS = (15.0, 30.0, 60.0, SECONDS)  # seconds by which bugs are found


def search_lines(results: Sequence[Searched]) -> list[str]:
    """A table: for each entry how many searches found it, how soon it was found and small, and what the smallest cases were."""
    lines = [
        "| entry | options of the search | found | cases to find | s to find | runs to smallest | s to smallest "
        "| smallest cases |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in results:
        columns: list[list[float]] = [
            [found.cases for found in one.found],
            [found.seconds for found in one.found],
            [found.runs for found in one.found if found.smallest],
            [found.shrink_seconds for found in one.found if found.smallest],
        ]
        figures = [str(spread(values)) if values else "-" for values in columns]
        shrunk = [found for found in one.found if found.smallest]
        sizes = Counter(found.smallest + (" (time was up)" if found.partial else "") for found in shrunk)
        smallest = "; ".join(f"{size} ({times})" for size, times in sizes.most_common(3))
        more = f"; {len(sizes) - 3} others" if len(sizes) > 3 else ""
        count = f"{len(one.found)} of {one.seeds}"
        lines.append(f"| {one.entry} | {one.told or '-'} | {count} | {' | '.join(figures)} | {smallest}{more} |")
    return lines


def in_turn_lines(model: str, beside: str, own: Share, other: Share) -> list[str]:
    """A line a model, and the share of the other's rate."""
    lines = [
        f"{name}: {1000 * share.whole:.1f} ms a case; engine {1000 * share.engine:.1f}, trace {1000 * share.trace:.1f}, "
        f"judge {1000 * share.judge:.1f}"
        for name, share in ((beside, other), (model, own))
    ]
    return [*lines, f"{other.whole / own.whole:.2f} of the rate of {beside}"]


def page(record: BenchRecord) -> str:
    """The page, in Markdown: what was measured so far."""
    searched = [record.searches[name].searched for name in LEDGER if name in record.searches]
    rows = [
        "# Benchmarks",
        "",
        f"Written by `make bench`, from [{RECORD}]({RECORD}). Figures are medians (lowest-highest). Ratios hold on other "
        "machines; seconds do not.",
        "",
        "## Speed",
        "",
        *(
            _speed_lines(record.speed)
            if record.speed
            else ["Not measured yet: `python -m tests.lab speed --write build/records`.", ""]
        ),
        "## Search",
        "",
        "Each search runs `fuzz` on a worker that has one known bug: its fix is undone, or the release has it. "
        "It is the default search, without an option or a hint. "
        "A live bug is searched for as if the ledger had neither it nor any other whose remedy mends it, too. "
        "`view` names one in which an approximation that the judge declares counts as wrong. "
        f"The clock starts when SGLang is imported; a search lasts up to {SECONDS:.0f} s, and shrinking up to "
        f"{SHRINK_SECONDS:.0f} s. After {GIVE_UP} seeds without a finding the entry is given up. A finding counts if its "
        "smallest case is equal with the entry's fix; a live bug counts as found with the first case that its remedy "
        "makes equal, and nothing is shrunk.",
        "",
        *_stamp_lines(record.searches),
        *search_lines(searched),
        "",
        _together(searched),
    ]
    absent = [name for name, entry in LEDGER.items() if name not in record.searches and not why_not(entry)]
    if absent:
        rows += [
            "",
            f"Not searched for yet (`python -m tests.lab search --missing --write build/records`): {', '.join(absent)}.",
        ]
    rows += [f"\nNever searched for: {why_not(entry)}." for entry in LEDGER.values() if why_not(entry)]
    return "\n".join([*rows, ""])


def _together(results: Sequence[Searched]) -> str:
    """How many bugs the searches found, and how soon."""
    medians = [median(hit.seconds for hit in one.found) for one in results if one.found]
    if not medians:
        return ""
    always = sum(len(one.found) == one.seeds for one in results)
    shares = (
        f"{sum(sum(hit.seconds <= limit for hit in one.found) / one.seeds for one in results):.1f} in {limit:.0f} s"
        for limit in _LIMITS
    )
    return (
        f"Of {len(results)} bugs {len(medians)} were found, {always} of them by every search. "
        f"The median of their medians is {median(medians):.1f} s. "
        f"One search finds {', '.join(shares)}: for each bug the share of its searches that found it by then, added up."
    )


def _stamp_lines(searches: Mapping[str, Search]) -> list[str]:
    """When and on what the entries were searched for: a line for each day and machine."""
    stamps: dict[tuple[Stamp, int, int], list[str]] = {}
    for name, search in searches.items():
        stamps.setdefault((search.stamp, search.at_once, search.processes), []).append(name)
    lines = []
    for (stamp, at_once, processes), names in stamps.items():
        which = f" ({', '.join(names)})" if len(stamps) > 1 else ""
        cores = "a core" if processes == 1 else f"{processes} cores"
        lines += [
            f"{_measured(stamp)} {'1 search' if at_once == 1 else f'{at_once} searches'} at a time, on {cores} each.{which}",
            "",
        ]
    return lines


def _measured(stamp: Stamp) -> str:
    return f"Measured on {stamp.date}: {stamp.machine}; {stamp.versions}."


def _speed_lines(speed: Speed) -> list[str]:
    rows = [
        _measured(speed.stamp),
        "",
        "| what | figure | how |",
        "|---|---|---|",
        *(
            f"| cases/s on one core, run, traced and judged, all kernels real (1-3 requests, prompts 10-40, about 3 rounds, "
            f"num_steps 3, topk {topk}) | {found} of {found.n} | `python -m tests.lab rate --topk {topk}` |"
            for topk, found in speed.rates.items()
        ),
        *(
            f"| of such a case's {1000 * share.whole:.0f} ms, topk {topk}: trace {1000 * share.trace:.1f} ms, judge "
            f"{1000 * share.judge:.1f} ms | {(share.trace + share.judge) / share.whole:.1%} | the same cases in turn on an "
            "engine that records nothing |"
            for topk, share in speed.shares.items()
        ),
        *(
            f"| a decode step of two requests, num_steps 3, topk {topk}: {_milliseconds(step.fast)} ms, and "
            f"{_milliseconds(step.interpreter)} ms in Triton's interpreter | {step.ratio} times faster | {step.ratio.n} cases "
            "in turn, of 4 and of 28 new tokens, on engines that record nothing: the difference |"
            for topk, step in speed.steps.items()
        ),
        f"| two processes at once against one, in turn | {speed.together.median / speed.alone.median:.2f} times "
        f"({speed.alone} and {speed.together} cases/s) | `python -m tests.lab rate`, twice at once |",
        f"| from the shell to the verdict, warm caches | {speed.start} s | `eagletwin check 25015` |",
        *(
            [f"| until an engine of another configuration stands | {speed.build} s | num_steps 2 to 8, in turn |"]
            if speed.build
            else []
        ),
        "",
        "Milliseconds of a case, run, traced and judged, by its size:",
        "",
    ]
    for name, values in speed.growth.items():
        rows += [f"| {name} | {' | '.join(str(value) for value in values)} |", f"|---|{'---|' * len(values)}"]
        rows += [f"| ms | {' | '.join(f'{1000 * found.median:.0f}' for found in values.values())} |", ""]
    return rows


def _milliseconds(seconds: Spread) -> Spread:
    return Spread(1000 * seconds.median, 1000 * seconds.low, 1000 * seconds.high, seconds.n)
