"""One forward of a model: what goes in and comes out, cut into requests."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.trace import snapshot

from .writer import Writer


@dataclass(slots=True)
class ForwardPass:
    """Made when ModelRunner.forward begins, recorded when it ends, also if that is with an exception.

    rows     of each request in the batch; they lie one request after another
    steps    the step of each request's record
    defined  of each request's rows, how many at the front are defined; None: all
    layer    of a multi-layer draft; else 0
    used     of a layer: whose attention backend and pools the model found, by what they are
    tensors  of each request's record so far
    experts  of each layer that has some: which ones each row of the batch goes to
    """

    stage: str
    requests: list[Any]
    rows: list[int]
    steps: list[int]
    defined: list[int] | None = None
    layer: int = 0
    used: dict[str, int] = field(default_factory=dict)
    tensors: list[dict[str, Array]] = field(default_factory=list)
    experts: list[Array] = field(default_factory=list)

    def begins(self, batch: Any, hidden: Tensor | None) -> Array:
        """Note ids, positions, slots and, of the draft, hidden states [n, H] that go in. Returns the slots [n]; a forward that
        writes no rows has none."""
        ids, positions = snapshot(batch.input_ids), snapshot(batch.positions)
        slots = None if batch.out_cache_loc is None else snapshot(batch.out_cache_loc)
        states, begin = None if hidden is None else snapshot(hidden), 0
        for n, length in enumerate(self.rows):
            kept = length if self.defined is None else max(0, min(self.defined[n], length))
            rows = slice(begin, begin + kept)
            tensors = {"input_ids": ids[rows], "positions": positions[rows]}
            if slots is not None:
                tensors["slots"] = slots[begin : begin + length]
            if states is not None:
                tensors["hidden_in"] = states[rows]
            self.tensors.append(tensors)
            begin += length
        return np.empty(0, np.int64) if slots is None else slots

    def returned(self, hidden: Tensor) -> None:
        """Note hidden states [n, H] that came out; all rows must be defined."""
        states, begin = snapshot(hidden), 0
        for tensors in self.tensors:
            rows = slice(begin, begin + len(tensors["input_ids"]))
            tensors["hidden_out"], begin = states[rows], rows.stop

    def record(self, writer: Writer) -> None:
        if self.experts:
            chosen, begin = np.stack([of_layer[: sum(self.rows)] for of_layer in self.experts], 1), 0
            for tensors, length in zip(self.tensors, self.rows, strict=True):
                tensors["experts"] = np.sort(chosen[begin : begin + len(tensors["input_ids"])], -1)
                begin += length
        for request, step, tensors in zip(self.requests, self.steps, self.tensors, strict=True):
            writer.add(request, self.stage, step, dict(self.used), tensors, self.layer)
