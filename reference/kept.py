"""What a layer that keeps a state in place of rows keeps of a sequence, and the short convolution before it.

Such a layer is delta.py's or mamba2.py's. Both convolve over the last few inputs of each channel, and keep those.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Kept:
    """What the layer keeps after each of R rows: what a row behind it begins from.

    state   [R, N, W, D]  of each head: rows by value, columns by key
    window  [R, C, kernel - 1]  inputs of the convolution, the oldest first; 0 before the sequence began
    """

    state: Tensor
    window: Tensor


def windows(mixed: Tensor, lengths: Sequence[int], kernel: int) -> Tensor:
    """The last `kernel` inputs of each channel, with each row's own: mixed [R, C] -> [R, C, kernel].

    lengths: of the sequences that the rows are.
    """
    before = torch.zeros(kernel - 1, mixed.shape[1], dtype=mixed.dtype)
    padded, begin = [], 0
    for length in lengths:
        padded.append(torch.cat([before, mixed[begin : begin + length]]).unfold(0, kernel, 1))  # [length, C, kernel]
        begin += length
    return torch.cat(padded)


def recur(nothing: Tensor, lengths: Sequence[int], step: Callable[[Tensor, int], Tensor]) -> Tensor:
    """The state after each row [R, N, W, D]. nothing [N, W, D]: before a sequence begins; lengths: of the sequences that the
    rows are; step(state, row): the state after that row."""
    states: list[Tensor] = []
    for length in lengths:
        state = nothing
        for _ in range(length):
            state = step(state, len(states))
            states.append(state)
    return torch.stack(states) if states else nothing[None][:0]
