"""Experts that somebody else chose, followed where rounding admits them: a choice can tie, and all numbers of a row follow.

A router's weights may come with `chosen` [R, K], the experts that each row of this forward went to elsewhere (-1: not known),
and `within`: how far off the difference of two scores may be there, as a share of the largest of the row. What is admitted
would be the best if the scores were off by no more.
"""

from itertools import combinations

import torch
from torch import Tensor

from .norm import Weights

CHOSEN, WITHIN = "chosen", "within"


def followed(weights: Weights, router: str, score: Tensor, own: Tensor, groups: int = 1, kept: int = 1) -> Tensor:
    """The experts of each row [R, K]: those that were given where they are admitted, else its own.

    score [R, X]: what experts are ranked by; own [R, K]. Groups are chosen first, by the sum of their two best experts, and a
    sum of two may be off by twice as much.
    """
    chosen = weights.get(f"{router}{CHOSEN}")
    if chosen is None:
        return own
    off = weights[f"{router}{WITHIN}"] * score.abs().amax(-1, keepdim=True)  # [R, 1]
    known = (chosen >= 0).all(-1)
    given = torch.where(known[:, None], chosen, own)
    taken = torch.zeros_like(score, dtype=torch.bool).scatter(1, given, True)  # [R, X]
    worst = torch.where(taken, score, torch.inf).amin(-1, keepdim=True)  # [R, 1]
    of_group = torch.arange(score.shape[-1]) // (score.shape[-1] // groups)  # [X]
    admitted = torch.zeros(len(score), dtype=torch.bool)
    for some in combinations(range(groups), kept):
        inside = torch.isin(of_group, torch.tensor(some))  # [X]
        best_left = torch.where(inside & ~taken, score, -torch.inf).amax(-1, keepdim=True)
        fits = (worst >= best_left - off)[:, 0] & ~(taken & ~inside).any(-1)
        admitted |= fits & _are_best(score, some, groups, off)
    return torch.where((admitted & known)[:, None], given, own)


def _are_best(score: Tensor, some: tuple[int, ...], groups: int, off: Tensor) -> Tensor:
    """Whether these groups may be those with the largest sums of two experts [R]."""
    others = [group for group in range(groups) if group not in some]
    if not others:
        return torch.ones(len(score), dtype=torch.bool)
    sums = score.view(len(score), groups, -1).topk(2).values.sum(-1)  # [R, groups]
    return sums[:, list(some)].amin(-1) >= sums[:, others].amax(-1) - 2 * off[:, 0]
