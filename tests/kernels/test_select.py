"""What is drafted: the growth of a tree step by step, its re-ranking, and the fused top-1 of a chain."""

from unittest.mock import patch

import pytest
import torch

from eagletwin.harness.commands.kernels.properties.select import INF, NAN, PROPERTIES, Growth, tree_grows
from eagletwin.harness.commands.kernels.release import SPEC, TOPK1, load, module

from .tests_of import make_tests

test_property, test_planted_fault_is_caught = make_tests(PROPERTIES)


def test_topk_as_large_as_the_vocabulary() -> None:
    """Each of four tokens at each of two steps."""
    for seed in range(20):
        tree_grows(Growth(2, 4, 3, 36 + 1, True, True, seed))


@pytest.mark.parametrize("topk", [1, 3])
def test_depth_one(topk: int) -> None:
    tree_grows(Growth(2, topk, 1, topk + 1, False, True, 0))


def test_no_request_grows_nothing_from_the_second_step_on() -> None:
    ids, hidden, scores, info = load(SPEC).select_top_k_tokens(
        1, torch.empty(0, 2), torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 3), torch.empty(0, 2), 2
    )
    assert [len(ids), len(hidden), len(scores), *map(len, info)] == [0] * 6


@pytest.mark.parametrize("block", [4, 8192])
def test_a_row_of_nothing_but_nan_drafts_the_first_token(block: int) -> None:
    """PR #32396: not the token after the vocabulary's last."""
    logits = torch.full((2, 10), NAN)
    with patch.object(module(TOPK1), "_DRAFT_TOPK1_BLOCK", block):
        assert load(TOPK1).draft_topk1_argmax_only(logits)[1].tolist() == [[0], [0]]


def test_nan_counts_as_minus_1e30_and_so_beats_what_is_masked_with_minus_infinity() -> None:
    """Where no logit is a number above -1e30, SGLang's fused top-1 drafts a token whose logit is NaN rather than one of -inf.
    Neither is any good; it matters only to who expects torch.argmax, which takes the first NaN of any row."""
    row = torch.tensor([[-INF, -2e30, NAN, -INF]])
    assert load(TOPK1).draft_topk1_argmax_only(row)[1].tolist() == [[2]]
    assert load(TOPK1).draft_topk1_argmax_only(torch.tensor([[-INF, 0.0, NAN, -INF]]))[1].tolist() == [[1]]
