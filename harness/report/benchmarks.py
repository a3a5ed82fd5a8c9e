"""The benchmark as a page and a plot."""

import datetime
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from eagletwin.cases.entry import Entry
from eagletwin.harness.acceptance import Acceptance
from eagletwin.harness.acceptance_layers import NEW_TOKENS, PROMPT_SIZE, PROMPTS, SEEDS, Cost
from eagletwin.harness.bench import Share, Spread, spread
from eagletwin.harness.fuzz import Finding
from eagletwin.harness.versions import installed

PAGE, PLOT = "benchmarks.md", "benchmarks.svg"


def search_lines(results: Sequence[tuple[Entry, list[Finding]]], seeds: int) -> list[str]:
    """A table: for each entry how soon it was found and small, and what the smallest cases were."""
    lines = ["| undone fix | found | cases to find | s to find | s to smallest | smallest cases |", "|---|---|---|---|---|---|"]
    for entry, findings in results:
        right = [finding for finding in findings if finding.outcome.verdict.status == "diverged"]
        sizes = sorted({_size(finding) for finding in right})
        figures = [
            str(spread(values)) if values else "-"
            for values in (
                [finding.cases for finding in right],
                [finding.seconds for finding in right],
                [finding.shrink_seconds for finding in right],
            )
        ]
        lines.append(f"| #{entry.id} | {len(right)} of {seeds} | {' | '.join(figures)} | {'; '.join(sizes)} |")
    return lines


def _size(finding: Finding) -> str:
    case = finding.outcome.case
    prompts = ", ".join(f"{len(request.prompt)}+{request.max_new_tokens}" for request in case.requests)
    chunks = f", chunks {list(case.chunks)}" if case.chunks else ""
    rest = f", page_size {case.page_size}" if case.page_size > 1 else ""
    return f"num_steps {case.num_steps}, prompt+new {prompts}{chunks}{rest}" + (" (time was up)" if finding.partial else "")


def page(
    *,
    rates: Mapping[int, Spread],
    share: Share,
    alone: Spread,
    together: Spread,
    start: Spread,
    growth: Mapping[str, Mapping[int, Spread]],
    found: Sequence[tuple[Entry, list[Finding]]],
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
        f"A fix is undone and nothing else is told; {seeds} seeds each. Seconds begin when SGLang is imported.",
        "",
        *search_lines(found, seeds),
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
