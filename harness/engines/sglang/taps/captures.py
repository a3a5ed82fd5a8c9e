"""What the forwards of draft decode leave in the buffers of a CUDA graph: noted while it is captured, read after a replay.

boot/cuda.py notes, inner.py reads.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.trace import snapshot


class Captures:
    """What draft decode of a tree holds between its steps, in the graph of each batch size.

    Tensors that Python refers to are not reused by the allocator of a graph, nor by that of a later one in the same pool. So
    what select_top_k_tokens returned while a graph was captured is where each replay of it writes the same values again. The
    graph itself is not changed; only its memory is reused less.
    """

    def __init__(self) -> None:
        self._steps: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {}  # batch size -> per step: tokens, scores, frontier

    def note(self, step: int, result: Any) -> None:
        """select_top_k_tokens of this step returned this. Warm-up runs, before a capture, are of no use."""
        if not torch.cuda.is_current_stream_capturing():
            return
        frontier, (scores, tokens, _) = result[0], result[3]
        if step == 0:
            self._steps[tokens.shape[0]] = []
        self._steps[tokens.shape[0]].append((tokens, scores, frontier))

    def read(self, size: int, count: int, topk: int) -> tuple[list[tuple[Array, Array]], Array]:
        """After the graph of this batch size ran for `count` requests: all candidates of each step, (tokens, scores)
        [count, ..], and the tokens that went on [count, (S - 1) * topk]."""
        steps = self._steps[size]
        candidates = [
            (snapshot(tokens[:count]).reshape(count, -1), snapshot(scores[:count]).reshape(count, -1))
            for tokens, scores, _ in steps
        ]
        frontiers = [snapshot(frontier).reshape(size, topk)[:count] for _, _, frontier in steps[:-1]]
        return candidates, np.concatenate(frontiers or [np.empty((count, 0), np.int64)], 1)


CAPTURES = Captures()
