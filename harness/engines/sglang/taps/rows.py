"""KV rows that are recorded: those committed, where they are new or have changed, and those of a draft()'s scratch slots."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.trace import snapshot

from .passes import flat
from .pools import Allocation, Pool
from .speculation import Speculation

# The committed KV rows of requests, recorded where they are new or have changed.


class ChangedRows:
    """Remembers the rows that it found last, of each request in each pool."""

    def __init__(self, allocation: Allocation, pools: dict[str, Pool]) -> None:
        self._allocation = allocation
        self._pools = pools
        self._last: dict[tuple[str, str], Array] = {}  # (request, pool) -> [n, 2, L, G, D]

    def of(self, requests: list[Any], ends: list[int]) -> list[dict[str, Array]]:
        """For each request: its table up to ends[n], and the KV rows below ends[n] that differ from those last recorded for it.

        All of them are read each time: a row that was overwritten later is a change, and so a record.
        """
        tables = [self._allocation.table(request, end) for request, end in zip(requests, ends, strict=True)]
        found = [{"table": table} for table in tables]
        if self._allocation.has_windows:
            for tensors in found:
                tensors["window_table"] = self._allocation.window_slots(tensors["table"])
        for name, pool in self._pools.items():
            rows = pool.rows_of(tables)  # of each request [end, 2, L, G, D]
            for request, end, stored_now, tensors in zip(requests, ends, rows, found, strict=True):
                before = self._last.get((request.rid, name))
                known = 0 if before is None else min(end, len(before))
                at, fresh = np.arange(known, end), stored_now[known:]
                if before is not None and not (stored_now[:known] == before[:known]).all():
                    changed = (stored_now[:known] != before[:known]).any((1, 2, 3, 4))
                    at = np.concatenate([np.flatnonzero(changed), at])
                    fresh = stored_now[at]
                self._last[request.rid, name] = stored_now
                tensors |= {f"{name}_rows": at, f"{name}_kv": fresh}
        return found


# How SGLang lays a draft tree out: slots in front of its branches, and the parts of its mask.


def holes_of(slots: Array, length: int, page: int) -> Array:
    """Slots [(topk - 1) * n] between the start of a page and where a branch begins in it, of branches 1..; slots [topk, S].

    length: of the committed prefix. Branch 0 begins in the page that it ends in, and has none of its own.
    """
    inside = length % page if len(slots) > 1 else 0
    if not inside:
        return np.empty(0, np.int64)
    # a wrong slot must reach the judge, not break the tap
    return np.maximum(slots[1:, :1] - inside + np.arange(inside), 0).ravel()


def tree_masks(mask: Array, mode: str, width: int, lengths: list[int]) -> list[Array]:
    """The tree's part of each request's mask [D, D]; D = width = num_draft_tokens. What lies before it belongs to the prefix.

    mode: name of SGLang's TreeMaskMode.
    """
    masks, begin = [], 0
    if mode == "QLEN_ONLY_BITPACKING":
        bits = mask.astype(np.int64).reshape(-1, width, 1) >> np.arange(width)
        return list((bits & 1).astype(np.bool_)[: len(lengths)])
    for length in lengths:
        row = width + (length if mode == "FULL_MASK" else 0)
        masks.append(mask[begin : begin + width * row].reshape(width, row)[:, row - width :])
        begin += width * row
    return masks


# The slots that a draft() borrows for its branches, and the KV rows that it leaves in them.


@dataclass(frozen=True, slots=True)
class Scratch:
    """Read when draft() returns, since verify writes over the rows. Of a draft without rows of its own there is nothing.

    slots  [b, topk, S], of each branch and step
    rows   of each request [steps that ran * topk, 2, L, G, D], by step; empty if no pool was read
    holes  of each request, rows of the slots in front of branches that begin inside a page [.., 2, L, G, D]; empty likewise
    """

    slots: Array = field(default_factory=lambda: np.empty(0, np.int64))
    rows: list[Array] = field(default_factory=list)
    holes: list[Array] = field(default_factory=list)


def scratch_of(batch: Any, lengths: list[int], pool: Pool | None, of: Speculation, ran: int) -> Scratch:
    """lengths: committed tokens of each request; pool: None where no rows are read; ran: forwards of draft decode."""
    if not of.steps:  # nothing was drafted, and nothing borrowed
        nothing = np.empty((len(lengths), of.topk, 0), np.int64)
        return Scratch(nothing, [] if pool is None else pool.rows_of([np.empty(0, np.int64)] * len(lengths)), [])
    slots = snapshot(batch.out_cache_loc).reshape(len(lengths), of.topk, -1)[:, :, : of.steps]
    if pool is None:
        return Scratch(slots, [], [])
    written = flat(slots[:, :, :ran].swapaxes(1, 2))
    holes = [holes_of(slots[n], length, of.page) for n, length in enumerate(lengths)]
    rows = pool.rows_of([*written, *holes])
    return Scratch(slots, rows[: len(lengths)], rows[len(lengths) :])
