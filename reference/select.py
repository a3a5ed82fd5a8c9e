"""Choosing: the best of a row, one step of a tree's growth, and the re-ranking of all candidates. Functions of numbers alone.

EAGLE-2 (arXiv 2406.16858): a candidate's score is the product of the draft model's probabilities on its path; at each step
the k best of the frontier's k * k children make the next frontier (4.1); at the end the best of all candidates are verified
(4.2). Where scores are equal the smaller place wins here. Nobody can rely on that of an engine: `as_good` says whether
another choice is right as well.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def best(values: Sequence[float], count: int) -> list[int]:
    """Places [count] of the largest values, the largest first; of equal ones the smaller place first. A NaN is never chosen
    before a number."""
    rank = [(value != value, -value, place) for place, value in enumerate(values)]
    return [place for _, _, place in sorted(rank)[:count]]


def as_good(values: Sequence[float], chosen: Sequence[int]) -> bool:
    """Whether these places, all different, hold the largest values in falling order: `best`, but for ties."""
    if len(set(chosen)) < len(chosen) or not all(0 <= place < len(values) for place in chosen):
        return False
    return [values[place] for place in chosen] == [values[place] for place in best(values, len(chosen))]


def child_scores(scores: Tensor, probabilities: Tensor) -> Tensor:
    """[k, k]: child j of frontier node i. scores [k] of the frontier, probabilities [k, k] of each node's k proposals."""
    return scores[:, None] * probabilities


def frontier_numbers(step: int, topk: int, places: Sequence[int]) -> list[int]:
    """Candidate numbers (tree.py) [k] of the frontier that `places` of the k * k children make. step 1: depth 2."""
    return [topk + (step - 1) * topk * topk + place for place in places]


def continued_rows(places: Sequence[int], topk: int) -> list[int]:
    """Which of the frontier's k rows [k] each new node continues: its parent's, whose hidden state it consumes."""
    return [place // topk for place in places]


def rerank(scores: Sequence[float], num_draft_tokens: int) -> list[int]:
    """The candidates [num_draft_tokens - 1] that are verified, in the order of their numbers. scores: of all candidates."""
    return sorted(best(scores, num_draft_tokens - 1))


def first_frontier(topk: int) -> Tensor:
    """[k + 1] int64: how SGLang's list of parents begins. -1 stands for the root, then the root's children."""
    return torch.arange(-1, topk)
