"""The committed KV rows of requests, recorded where they are new or have changed."""

from typing import Any

import numpy as np

from eagletwin.harness.core.arrays import Array

from .pools import Allocation, Pool


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
