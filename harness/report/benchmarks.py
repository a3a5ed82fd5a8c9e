"""The benchmark as a page and a plot."""

import datetime
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from eagletwin.cases.entry import Entry
from eagletwin.harness.acceptance import Acceptance
from eagletwin.harness.acceptance_layers import NEW_TOKENS, PROMPT_SIZE, PROMPTS, SEEDS, Cost
from eagletwin.harness.bench import Share, Spread, spread
from eagletwin.harness.bench_search import AT_ONCE, GIVE_UP, SECONDS, SHRINK_SECONDS, Searched, why_not
from eagletwin.harness.versions import installed

PAGE, PLOT = "benchmarks.md", "benchmarks.svg"


def search_lines(results: Sequence[Searched], others: Sequence[Entry]) -> list[str]:
    """A table: for each entry how soon it was found and small, and what the smallest cases were; of the others, why not."""
    lines = [
        "| entry | told beside the change | found | cases to find | s to find | runs to smallest | s to smallest "
        "| smallest cases |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in results:
        columns: list[list[float]] = [
            [found.cases for found in one.found],
            [found.seconds for found in one.found],
            [found.runs for found in one.found],
            [found.shrink_seconds for found in one.found],
        ]
        figures = [str(spread(values)) if values else "-" for values in columns]
        sizes = Counter(found.smallest + (" (time was up)" if found.partial else "") for found in one.found)
        smallest = "; ".join(f"{size} ({times})" for size, times in sizes.most_common(3))
        more = f"; {len(sizes) - 3} others" if len(sizes) > 3 else ""
        count = f"{len(one.found)} of {one.seeds}"
        lines.append(f"| {one.entry} | {one.told or '-'} | {count} | {' | '.join(figures)} | {smallest}{more} |")
    return [*lines, *(f"| {entry.id} | not searched: {why_not(entry)} | - | - | - | - | - | - |" for entry in others)]


def page(
    *,
    rates: Mapping[int, Spread],
    share: Share,
    alone: Spread,
    together: Spread,
    start: Spread,
    growth: Mapping[str, Mapping[int, Spread]],
    found: Sequence[Searched],
    others: Sequence[Entry],
    seeds: int,
) -> str:
    """The page, in Markdown."""
    versions = ", ".join(f"{name} {installed(name)}" for name in ("sglang", "torch", "triton"))
    overhead = (share.trace + share.judge) / share.whole
    rows = [
        "# Benchmarks",
        "",
        f"Written by `make bench` on {datetime.date.today().isoformat()}: {platform.machine()}, {os.cpu_count()} cores "
        f"({_processor()}), Linux, Python {platform.python_version()}, {versions}. Figures are medians (lowest-highest). "
        "Ratios hold on other machines; seconds do not.",
        "",
        "| what | figure | how |",
        "|---|---|---|",
        *(
            f"| cases/s on one core, run, traced and judged, all kernels real (1-3 requests, prompts 10-40, about 3 rounds, "
            f"num_steps 3, topk {topk}) | {found} of {found.n} | `eagletwin bench rate --topk {topk}` |"
            for topk, found in rates.items()
        ),
        f"| of a case's {1000 * share.whole:.0f} ms: trace {1000 * share.trace:.1f} ms, judge {1000 * share.judge:.1f} ms | "
        f"{overhead:.0%} | the same cases in turn on an engine that records nothing |",
        f"| two processes at once against one, in turn | {together.median / alone.median:.2f} times ({alone} and {together} "
        "cases/s) | `eagletwin bench rate`, twice at once |",
        f"| from the shell to the verdict, warm caches | {start} s | `eagletwin check 25015` |",
        "",
        "## Search",
        "",
        f"A fix is undone, or the release has the bug, and `fuzz` is told nothing else; {seeds} seeds each. Drafts of several "
        "layers, and requests that sample, are generated only where they are asked for; the live bugs which most of those "
        "cases would show are mended, unless they are what is searched for. Seconds begin when SGLang is imported, and are "
        f"those of {AT_ONCE} searches at a time, each of up to {SECONDS:.0f} s, and {SHRINK_SECONDS:.0f} s for its smallest "
        f"case; after {GIVE_UP} that found nothing an entry is given up. A finding counts if its smallest case is equal with "
        "the entry's fix.",
        "",
        *search_lines(found, others),
        "",
        "## Growth",
        "",
        "Milliseconds of a case, run, traced and judged:",
        "",
    ]
    for name, values in growth.items():
        rows += [f"| {name} | {' | '.join(str(value) for value in values)} |", f"|---|{'---|' * len(values)}"]
        rows += [f"| ms | {' | '.join(f'{1000 * found.median:.0f}' for found in values.values())} |", ""]
    rows += [f"![time of a case by its size]({PLOT})", ""]
    return "\n".join(rows)


def acceptance_lines(found: Sequence[Acceptance]) -> list[str]:
    """The table of `eagletwin bench acceptance`."""
    rows = [
        "| model | topk, num_steps, num_draft_tokens | tokens a round, slot_layout | true_tree | lost |",
        "|---|---|---|---|---|",
    ]
    return rows + [
        f"| {one.model} | {', '.join(map(str, one.shape))} | {one.slot_layout:.3f} ({one.rounds} rounds) | {one.true_tree:.3f} "
        f"| {one.cost:.1%} |"
        for one in found
    ]


def layers_lines(found: Sequence[Cost]) -> list[str]:
    """The table of `eagletwin bench acceptance --layers`."""
    rows = [
        f"Means of {SEEDS} seeds of {PROMPTS} requests, {PROMPT_SIZE} prompt and {NEW_TOKENS} new tokens; ± the standard "
        "deviation between seeds.",
        "",
        "| model | layers | fault | tokens a round with it | without | lost | rows that stay wrong |",
        "|---|---|---|---|---|---|---|",
    ]
    return rows + [
        f"| {one.model} | {one.num_steps} | {one.fault.name} | {fmean(one.wrong):.2f} | {fmean(one.right):.2f} "
        f"| {one.cost:.1%} ± {one.spread:.1%} | {one.stale:.0%} |"
        for one in found
    ]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def plot(growth: Mapping[str, Mapping[int, Spread]]) -> str:
    """One panel a variable: medians with their spread, in milliseconds. SVG."""
    width, height, pad = 300, 220, 44
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width * len(growth)}" height="{height + 20}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, (name, values) in enumerate(growth.items()):
        left, top = number * width + pad, 20
        right, bottom = (number + 1) * width - 12, height - 20
        most = 1000 * max(found.high for found in values.values())
        last = max(values)

        def x(value: float, left: float = left, right: float = right, last: float = last) -> float:
            return left + (right - left) * value / last

        def y(milliseconds: float, top: float = top, bottom: float = bottom, most: float = most) -> float:
            return bottom - (bottom - top) * milliseconds / most

        parts.append(f'<path d="M{left} {top}V{bottom}H{right}" fill="none" stroke="#444"/>')
        parts += [
            f'<text x="{left - 4}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:.0f}</text>' for tick in (0, most / 2, most)
        ]
        for value, found in values.items():
            low, high = y(1000 * found.low), y(1000 * found.high)
            parts.append(f'<path d="M{x(value):.1f} {low:.1f}V{high:.1f}" stroke="#88a"/>')
            parts.append(f'<circle cx="{x(value):.1f}" cy="{y(1000 * found.median):.1f}" r="3" fill="#225"/>')
            parts.append(f'<text x="{x(value):.1f}" y="{bottom + 14}" text-anchor="middle">{value}</text>')
        line = " ".join(f"{x(value):.1f},{y(1000 * found.median):.1f}" for value, found in values.items())
        parts.append(f'<polyline points="{line}" fill="none" stroke="#225"/>')
        parts.append(f'<text x="{(left + right) / 2:.0f}" y="{height + 10}" text-anchor="middle">{name} (ms a case)</text>')
    return "\n".join([*parts, "</svg>", ""])
