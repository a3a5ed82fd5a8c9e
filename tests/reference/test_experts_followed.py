"""Experts that somebody else chose: followed where rounding admits them, and nowhere else."""

import pytest
import torch
from torch import Tensor

from eagletwin.reference.experts import CHOSEN, WITHIN, followed, ranked_by
from eagletwin.reference.sizes import ExpertShape

SCORES = torch.tensor([[1.0, 0.9, 0.896, 0.2]], dtype=torch.float64)  # experts 1 and 2 are 0.004 apart


def _followed(score: Tensor, chosen: list[int], within: float, groups: int = 1, kept: int = 1) -> list[int]:
    weights = {f"gate.{CHOSEN}": torch.tensor([chosen]), f"gate.{WITHIN}": torch.tensor(within)}
    shape = ExpertShape(count=score.shape[1], chosen=2, inner=1, affinity="sigmoid", shared=False, groups=groups, kept=kept)
    own = ranked_by(score, 0.0, shape).topk(2).indices
    found: list[int] = followed(weights, "gate.", score, own, groups, kept)[0].tolist()
    return found


@pytest.mark.parametrize(
    ("chosen", "within", "expected"),
    [
        ([0, 2], 0.005, [0, 2]),
        ([0, 2], 0.003, [0, 1]),  # they are farther apart
        ([1, 2], 0.005, [0, 1]),  # so is the best one
        ([1, 2], 0.2, [1, 2]),
        ([0, 3], 0.005, [0, 1]),
        ([-1, -1], 1.0, [0, 1]),  # nobody says what was chosen
    ],
)
def test_what_was_chosen_is_followed_within_the_bound(chosen: list[int], within: float, expected: list[int]) -> None:
    assert _followed(SCORES, chosen, within) == expected


def test_the_bound_is_a_share_of_the_largest_score() -> None:
    assert _followed(10 * SCORES, [0, 2], 0.005) == [0, 2]
    assert _followed(10 * SCORES, [0, 2], 0.003) == [0, 1]


def test_nothing_is_followed_where_nothing_is_given() -> None:
    own = SCORES.topk(2).indices
    assert followed({}, "gate.", SCORES, own) is own


def test_a_tie_of_groups_admits_experts_of_another_group() -> None:
    # groups of 1.5, 0.902, 0.9 and 0.1, of which two are kept: experts 0 and 2 are the best of them
    score = torch.tensor([[1.1, 0.4, 0.6, 0.302, 0.7, 0.2, 0.05, 0.05]], dtype=torch.float64)
    assert _followed(score, [0, 4], 0.01, groups=4, kept=2) == [0, 4]  # of the other group, which ties
    assert _followed(score, [0, 4], 0.0005, groups=4, kept=2) == [0, 2]
    assert _followed(score, [0, 1], 0.01, groups=4, kept=2) == [0, 2]  # whichever is kept, it has a better one
    score[0, 3] = 0.4  # the second group has 1.0 now
    assert _followed(score, [0, 4], 0.01, groups=4, kept=2) == [0, 2]


def test_experts_of_more_groups_than_are_kept_are_not_followed() -> None:
    score = torch.full((1, 8), 0.5, dtype=torch.float64)
    own = torch.tensor([[0, 1]])
    weights = {f"gate.{CHOSEN}": torch.tensor([[0, 2]]), f"gate.{WITHIN}": torch.tensor(0.1)}
    assert followed(weights, "gate.", score, own, 4, 1).tolist() == [[0, 1]]
    assert followed(weights, "gate.", score, own, 4, 2).tolist() == [[0, 2]]
