"""The slots that a draft() borrows for its branches, and the KV rows that it leaves in them."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.trace import snapshot

from .draft_pass import flat
from .pools import Pool
from .speculation import Speculation
from .tree_layout import holes_of


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
