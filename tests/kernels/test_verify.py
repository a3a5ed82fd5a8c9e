"""Greedy verification of a tree, in the Triton twin of SGLang's CUDA kernel."""

from eagletwin.harness.commands.kernels.properties.tree import PROPERTIES, check_path
from eagletwin.harness.commands.kernels.trees import Batch, Tree
from eagletwin.reference.tree import walk_greedy

from .tests_of import make_tests

test_property, test_planted_fault_is_caught = make_tests(PROPERTIES)


def test_no_request_accepts_nothing() -> None:
    check_path(Batch(2, 2, 4, (), (), 0), [], [])


def test_of_siblings_with_one_token_the_first_is_accepted() -> None:
    """A draft model proposes each token once under one parent; if it did not, the smaller node would win, and its children be
    asked: the second sibling's child is not reached though it would have matched."""
    tree = Tree(2, 2, ((0, 1), (2, 4)), (0, 1, 4))  # node 3 is a child of node 2
    check_path(Batch(2, 2, 4, (tree,), (0,), 0), [[9, 5, 5, 6]], [[5, 6, 6, 8]])
    assert walk_greedy([9, 5, 5, 6], tree.parents, [5, 6, 6, 8]) == [0, 1]


def test_the_whole_of_the_longest_path_is_accepted() -> None:
    tree = Tree(1, 4, ((0,), (1,), (2,), (3,)), (0, 1, 2, 3))
    check_path(Batch(1, 4, 5, (tree, tree), (0, 0), 0), [[9, 1, 2, 3, 4], [9, 1, 2, 3, 0]], [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]])
