"""What follows a verified path: bonus tokens, lengths, compaction, and the inputs and layout of draft extend."""

import pytest

from eagletwin.harness.commands.kernels.properties.commit import (
    PROPERTIES,
    Tracked,
    Verified,
    Window,
    chain_verify_is_committed,
    draft_extend_gets_its_inputs,
    draft_extend_gets_its_layout,
    rows_come_to_the_front,
)
from eagletwin.harness.commands.kernels.trees import Batch, Tree

from .tests_of import make_tests

test_property, test_planted_fault_is_caught = make_tests(PROPERTIES)


def test_a_batch_larger_than_one_block_of_the_kernels() -> None:
    """128 lanes a program."""
    tree = Tree(1, 2, ((0,), (1,)), (0, 1))
    case = Verified(Batch(1, 2, 3, (tree,) * 150, tuple(range(150)), 3))
    chain_verify_is_committed(Tracked(case, 4))
    draft_extend_gets_its_inputs(case)
    draft_extend_gets_its_layout(Window(tuple(range(150)), 3, 0, True, False))


def test_a_tree_smaller_than_its_deepest_path_cannot_be_compacted() -> None:
    """num_draft_tokens < num_steps + 1. No path is longer than the tree, but accept_index is as wide as the steps are many, and
    SGLang puts all of it into a block that is narrower. Nothing in its server arguments forbids such a tree for topk > 1."""
    tree = Tree(2, 3, ((0, 1), (2, 3), (6, 7)), (0, 1))
    case = Verified(Batch(2, 3, 3, (tree,), (5,), 0))
    with pytest.raises(RuntimeError, match=r"expanded size|must match"):
        rows_come_to_the_front(case)
