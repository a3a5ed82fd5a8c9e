"""Where rows lie, against layouts written out by hand."""

from eagletwin.reference import layout
from eagletwin.reference.sizes import branch_pages


def test_a_chain_lies_behind_the_committed_rows() -> None:
    assert layout.draft_columns(10, 1, 3, 1).tolist() == [[10], [11], [12]]
    assert layout.draft_columns(10, 1, 3, 4).tolist() == [[10], [11], [12]]


def test_branches_without_pages_lie_one_after_the_other() -> None:
    assert layout.draft_columns(10, 2, 3, 1).tolist() == [[10, 13], [11, 14], [12, 15]]


def test_branches_with_pages_share_none() -> None:
    """M = 10 and pages of 4: the page of columns 8..11 holds two committed rows, and three more rows need a second page.

    Branch 0 has columns 8..15 (8, 9 committed), branch 1 16..23 (16, 17 are holes), branch 2 24..31.
    """
    assert branch_pages(10, 3, 4) == 2
    assert layout.draft_columns(10, 3, 3, 4).tolist() == [[10, 18, 26], [11, 19, 27], [12, 20, 28]]
    assert layout.hole_columns(10, 3, 3, 4).tolist() == [[16, 17], [24, 25]]


def test_a_prefix_of_whole_pages_leaves_no_holes() -> None:
    assert layout.draft_columns(8, 2, 3, 4).tolist() == [[8, 12], [9, 13], [10, 14]]
    assert layout.hole_columns(8, 2, 3, 4).shape == (1, 0)
    assert layout.hole_columns(9, 1, 3, 4).shape == (0, 0)
    assert layout.hole_columns(9, 3, 3, 1).shape == (2, 0)


def test_nodes_lie_in_their_own_order() -> None:
    assert layout.verify_columns(10, 4).tolist() == [10, 11, 12, 13]
