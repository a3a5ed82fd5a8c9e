"""The draft's KV rows of requests that are recorded: each once, when it is committed. What a checkpoint at hand explains."""

from typing import Any

import numpy as np

from eagletwin.harness.core.arrays import Array

from ..taps.changed_rows import ChangedRows
from ..taps.pools import Allocation, Pool
from .underway import KEPT, UnderWay


class CommittedRows(ChangedRows):
    """In the place of ChangedRows, which reads all rows each time: a server's requests are too long for that.

    most: rows of a request, at most
    """

    def __init__(self, allocation: Allocation, pool: Pool, underway: UnderWay, most: int) -> None:
        super().__init__(allocation, {})
        self._pool, self._underway, self._most = pool, underway, most

    def of(self, requests: list[Any], ends: list[int]) -> list[dict[str, Array]]:
        """As there; of the rows below ends[n] those that were not recorded yet."""
        found = super().of(requests, ends)
        parts = []
        for request, end, tensors in zip(requests, ends, found, strict=True):
            recording = self._underway.by_rid.get(request.rid)
            if recording is None or recording.rows >= min(end, self._most):
                continue
            begin, recording.rows = recording.rows, min(end, self._most)
            tensors["draft_rows"] = np.arange(begin, recording.rows)
            parts.append((tensors, tensors["table"][begin : recording.rows]))
        if parts:
            for (tensors, _), rows in zip(parts, self._pool.rows_of([slots for _, slots in parts]), strict=True):
                tensors[KEPT] = rows
        return found
