"""Penalties on tokens that were emitted before: their logits are lowered, by how often they were (frequency), because they were
(presence), and then scaled towards or away from 0 (repetition; CTRL, arXiv 1909.05858). Prompts do not count. What ends a text
is impossible as long as it is too short."""

from collections.abc import Sequence

import torch
from torch import Tensor


def penalized(logits: Tensor, emitted: Sequence[int], frequency: float, presence: float, repetition: float) -> Tensor:
    """One row of logits [V] after these tokens -> [V]."""
    counts = torch.bincount(torch.tensor(emitted, dtype=torch.int64), minlength=len(logits)).double()  # [V]
    lowered = logits - frequency * counts - presence * (counts > 0)  # [V]
    scaled = torch.where(lowered > 0, lowered / repetition, lowered * repetition)  # [V]
    return torch.where(counts > 0, scaled, lowered)


def held_back(logits: Tensor, emitted: int, least: int, ends: Sequence[int]) -> Tensor:
    """One row of logits [V] after so many tokens: what ends a text is impossible before it has `least` -> [V]."""
    if emitted >= least:
        return logits
    return logits.index_fill(-1, torch.tensor(ends), -torch.inf)
