"""Trees of integers, against trees drawn by hand.

The tree of most tests, k = 2, with 6 draft tokens; node: token (candidate)

        0: 50
       /     \\
    1: 7 (0)  2: 9 (1)        the first frontier is candidates 0, 1: they propose candidates 2, 3 and 4, 5
     |   \\       \\
  3: 4 (2) 4: 8 (3)  5: 4 (4)     the second frontier could be 4, 2
"""

import pytest
import torch

from eagletwin.reference import tree
from eagletwin.reference.sizes import count_candidates

PARENTS = [-1, 0, 0, 1, 1, 2]
TOKENS = [50, 7, 9, 4, 8, 4]


def test_candidates_are_numbered_depth_by_depth_and_in_the_order_of_the_frontier() -> None:
    """k = 2: 0, 1 are the root's; 2, 3 the first expanded node's; then 6, 7 are those of candidate 4, expanded third."""
    expanded = [0, 1, 4, 2]
    assert [tree.parent_of(candidate, 2, expanded) for candidate in range(10)] == [-1, -1, 0, 0, 1, 1, 4, 4, 2, 2]
    assert count_candidates(2, 3) == 10
    assert count_candidates(1, 5) == 5
    assert count_candidates(4, 1) == 4


def test_parents_of_selected_candidates() -> None:
    assert tree.tree_parents([0, 1, 2, 3, 4], 2, [0, 1]) == PARENTS
    assert tree.tree_parents([0, 1, 4, 6, 7], 2, [0, 1, 4, 2]) == [-1, 0, 0, 2, 3, 3]


def test_a_frontier_in_another_order_gives_other_parents() -> None:
    """Candidates 6, 7 belong to the candidate that was expanded third, whatever its number."""
    assert tree.tree_parents([0, 1, 2, 4, 6], 2, [0, 1, 4, 2]) == [-1, 0, 0, 1, 2, 4]
    assert tree.tree_parents([0, 1, 2, 4, 6], 2, [0, 1, 2, 4]) == [-1, 0, 0, 1, 2, 3]


def test_a_node_without_its_parent_is_no_tree() -> None:
    with pytest.raises(ValueError, match="candidate 2 was selected, and its parent 0 was not"):
        tree.tree_parents([1, 2], 2, [0, 1])


def test_a_chain_is_a_tree() -> None:
    assert tree.tree_parents([0, 1, 2], 1, [0, 1]) == [-1, 0, 1, 2]


def test_depths() -> None:
    assert tree.depths(PARENTS) == [0, 1, 1, 2, 2, 2]
    assert tree.depths([-1]) == [0]


def test_a_node_sees_itself_and_its_ancestors() -> None:
    assert tree.ancestor_mask(PARENTS).int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 0, 1, 0, 0, 1],
    ]


def test_the_full_mask_has_the_committed_prefix_in_front() -> None:
    mask = tree.full_mask(PARENTS, 3)
    assert mask.shape == (6, 9)
    assert mask[:, :3].all()
    assert torch.equal(mask[:, 3:], tree.ancestor_mask(PARENTS))


def test_the_packed_mask_has_a_bit_for_each_node_seen() -> None:
    assert tree.packed_mask(PARENTS) == [0b1, 0b11, 0b101, 0b1011, 0b10011, 0b100101]


def test_retrieve_links_lead_to_the_first_child_and_along_siblings() -> None:
    first, sibling = tree.retrieve_links(PARENTS)
    assert first == [1, 3, 5, -1, -1, -1]
    assert sibling == [-1, 2, -1, 4, -1, -1]


def test_leaf_paths() -> None:
    assert tree.leaf_paths(PARENTS) == [[0, 1, 3], [0, 1, 4], [0, 2, 5]]


@pytest.mark.parametrize(
    ("argmax", "path"),
    [
        ({0: 1}, [0]),  # nothing is accepted
        ({0: 7, 1: 8}, [0, 1, 4]),  # not a front prefix of the nodes
        ({0: 9, 2: 4}, [0, 2, 5]),  # node 3 has the same token and another parent
        ({0: 9, 2: 8}, [0, 2]),
        ({0: 7, 1: 4, 3: 4}, [0, 1, 3]),  # a leaf: the walk is over, whatever the argmax
    ],
)
def test_the_greedy_walk(argmax: dict[int, int], path: list[int]) -> None:
    assert tree.walk_greedy(TOKENS, PARENTS, [argmax.get(node, 0) for node in range(6)]) == path


def test_a_chain_is_accepted_up_to_the_first_difference() -> None:
    chain = [-1, 0, 1, 2]
    assert tree.walk_greedy([9, 4, 5, 6], chain, [4, 5, 7, 1]) == [0, 1, 2]
    assert tree.walk_greedy([9, 4, 5, 6], chain, [4, 5, 6, 1]) == [0, 1, 2, 3]
    assert tree.walk_greedy([9, 4, 5, 6], chain, [8, 5, 6, 1]) == [0]


def test_the_path_moves_to_the_front() -> None:
    rows = torch.arange(6) * 10
    assert tree.move_to_front(rows, [0, 2, 5]).tolist()[:3] == [0, 20, 50]
    assert tree.move_to_front(rows, [0, 2, 5]).shape == (6,)
