"""Rows of sequences: which stand where and see which, and what a target computes of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .state_layers import Kept


@dataclass(frozen=True, slots=True)
class TargetRows:
    """What the target computes at every position of a sequence; row i has consumed tokens 0..i.

    hidden   [T, H]        h[i] of DESIGN §2, which the draft consumes: after the final norm; or, where the shape names A
                           aux_layers, [T, A*H]: the residual stream as it leaves each of them, in the order of the layers;
                           or, where it says pre_norm: residual
    residual [T, H]        before the final norm; normed: after it
    logits   [T, V]
    keys     [L, T, G, D]  as a KV pool stores them, after RoPE; of latent attention [L, T, 1, C+P] (layers.py). There are
                           none of layers that keep a state
    values   [L, T, G, D]  of latent attention empty
    kept     of each layer that keeps a state, what it keeps after each row (state_layers.py)
    compressors  of each layer, what its compressors keep of each row [T, C] (compressed.py)
    """

    hidden: Tensor
    residual: Tensor
    normed: Tensor
    logits: Tensor
    keys: Tensor
    values: Tensor
    kept: tuple[Kept, ...] = ()
    compressors: tuple[Tensor, ...] = ()


def causal(length: int) -> Tensor:
    """sees [T, T]: row i sees rows 0..i."""
    return torch.ones(length, length, dtype=torch.bool).tril()


def in_window(sees: Tensor, window: int) -> Tensor:
    """Of the rows that each row sees [R, E], the last `window`; 0: all.

    What a row sees is one row of each position up to its own, in their order, also on a branch of a tree: the last `window` of
    them are the positions p - window + 1..p (arXiv 2004.05150 §3.1, and Mistral's arXiv 2310.06825 §2).
    """
    if not window:
        return sees
    newer = sees.flip(-1).cumsum(-1).flip(-1)  # [R, E] how many of the rows that it sees stand there or behind
    return sees & (newer <= window)


def side_by_side(lengths: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Sequences of these lengths, one after the other: sequence [T], which one a row is of; positions [T]; sees [T, T].

    Nobody writes to them: those that asked last are given the same tensors again.
    """
    return _side_by_side(tuple(lengths), torch.get_default_device())


@lru_cache(maxsize=4)  # a target and its draft run over the same rows
def _side_by_side(lengths: tuple[int, ...], _device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    sequence = torch.repeat_interleave(torch.tensor(lengths))  # [T]
    positions = torch.cat([torch.arange(length) for length in lengths])  # [T]
    same = sequence[None, :] == sequence[:, None]  # [T, T]
    return sequence, positions, same & causal(len(sequence))


@dataclass(frozen=True, slots=True)
class Standing:
    """Where R rows of a layer stand, for attention.

    positions [R]; sees [R, R]: row r may attend to the rows where sees[r] is true
    lengths   of the sequences that they are of, where a layer needs it
    before    [E, 1, D] rows that stand before these; sees is [R, E + R] then
    """

    positions: Tensor
    sees: Tensor
    lengths: Sequence[int] = ()
    before: Tensor | None = None
