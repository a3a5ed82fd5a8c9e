"""How decode batches ran: in a graph of their size, padded to a larger one's, or without a graph. The campaign counts them."""

from collections import Counter

from eagletwin.harness.core.trace import Trace
from eagletwin.harness.families import RECIPES

PATHS = ("exact", "padded", "eager")


def path(size: int, graphs: tuple[int, ...], in_graph: bool) -> str:
    """Which path a batch took, by the sizes that graphs are captured for."""
    return "eager" if not in_graph else "exact" if size in graphs else "padded"


def paths(trace: Trace, graphs: tuple[int, ...]) -> dict[str, int]:
    """Decode batches by size and by how each ran, as "3 padded".

    The trace says whether draft decode, or of several layers draft extend, was a replay. Where neither can be, of a single
    step, the sizes that were captured tell.
    """
    requests: Counter[int] = Counter()
    replayed: set[int] = set()
    case = trace.header.case
    for record in trace.header.records:
        if record.stage == "verify":
            requests[record.iteration] += 1
        elif record.numbers.get("in_graph"):
            replayed.add(record.iteration)
    recorded = case.num_steps > 1 or RECIPES[case.model].mtp_layers > 0
    counts: Counter[str] = Counter()
    for iteration, size in requests.items():
        in_graph = iteration in replayed if recorded else size <= max(graphs, default=0)
        counts[f"{size} {path(size, graphs, in_graph)}"] += 1
    return dict(counts)


def table(counts: Counter[str]) -> str:
    """Decode batches: a line for each size, a column for each path."""
    sizes = sorted({int(name.split()[0]) for name in counts})
    lines = [f"{'batch':>5} " + " ".join(f"{name:>8}" for name in PATHS)]
    lines += [f"{size:>5} " + " ".join(f"{counts[f'{size} {name}']:>8,}" for name in PATHS) for size in sizes]
    return "\n".join(lines)
