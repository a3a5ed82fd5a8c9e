"""Choosing, by hand; and which columns draft decode reads."""

import torch

from eagletwin.reference.layout import draft_columns, draft_reads, physical_slot
from eagletwin.reference.tree import as_good, best, child_scores, continued_rows, first_frontier, frontier_numbers, rerank

NAN = float("nan")


def test_the_best_of_a_row() -> None:
    assert best([1.0, 3.0, 3.0, 2.0], 3) == [1, 2, 3]
    assert best([NAN, -5.0, NAN], 2) == [1, 0]
    assert best([1.0], 4) == [0]


def test_a_tie_may_go_either_way_and_nothing_else_may() -> None:
    values = [1.0, 3.0, 3.0, 2.0]
    assert as_good(values, [2, 1])
    assert not as_good(values, [1, 1])
    assert not as_good(values, [1, 3])
    assert not as_good(values, [3, 1])
    assert not as_good(values, [1, 4])
    assert not as_good(values, [-2, 1])


def test_one_step_of_growth() -> None:
    scores = child_scores(torch.tensor([0.5, 0.25]), torch.tensor([[0.5, 0.25], [1.0, 0.0]]))
    assert scores.tolist() == [[0.25, 0.125], [0.25, 0.0]]
    assert frontier_numbers(1, 2, [0, 2]) == [2, 4]
    assert frontier_numbers(2, 2, [3]) == [9]
    assert continued_rows([0, 2, 3], 2) == [0, 1, 1]
    assert first_frontier(2).tolist() == [-1, 0, 1]


def test_candidates_are_verified_in_the_order_of_their_numbers() -> None:
    assert rerank([0.2, 0.9, 0.1, 0.8], 4) == [0, 1, 3]


def test_a_branch_reads_the_prefix_and_its_own_columns() -> None:
    assert draft_reads(5, 1, 2, 2, 3, 1, 0, 0).tolist() == [0, 1, 2, 3, 4, 8, 9]
    assert draft_reads(5, 1, 2, 2, 3, 1, 2, 1).tolist() == [0, 3, 4, 8, 9]
    assert draft_reads(3, 0, 1, 1, 3, 1, 2, 1).tolist() == [0, 1, 2, 3]
    assert draft_reads(5, 1, 1, 2, 3, 4, 0, 0).tolist() == [0, 1, 2, 3, 4, int(draft_columns(5, 2, 3, 4)[0, 1])]


def test_a_slot_of_no_page_is_the_padding_slot() -> None:
    assert physical_slot(9, [5, 3, 7], 4) == 29
    assert physical_slot(9, [5, 3, -1], 4) == 0
    assert physical_slot(13, [5, 3, 7], 4) == 0
    assert physical_slot(-1, [5, 3, 7], 4) == 0
