"""Building the tree that the target verifies: tokens, positions, mask and links, of trees and of chains; packing of masks."""

from random import Random

import pytest
import torch
from torch import Tensor

from eagletwin.harness.commands.kernels.properties.tree import BITS, FULL, PROPERTIES, QLEN, TreeBuild, build, tree_is_built
from eagletwin.harness.commands.kernels.release import TREE, load
from eagletwin.harness.commands.kernels.trees import Batch, Tree, grow
from eagletwin.harness.engines.triton_cpu import OutOfBounds
from eagletwin.reference.tree import packed_mask

from .tests_of import make_tests

test_property, test_planted_fault_is_caught = make_tests(PROPERTIES)


def batch_of(*trees: Tree, lengths: tuple[int, ...]) -> Batch:
    return Batch(trees[0].topk, trees[0].num_steps, len(trees[0].selected) + 1, trees, lengths, 0)


@pytest.mark.parametrize("mode", [FULL, QLEN])
def test_no_request_has_no_tree(mode: int) -> None:
    mask, positions, *links, nodes_tokens = build(TreeBuild(Batch(2, 2, 4, (), (), 0), mode))
    assert [len(mask), len(positions), len(nodes_tokens)] == [0, 0, 0]
    assert all(link.shape == (0, 4) for link in links)


def test_depth_one_is_a_star() -> None:
    tree = Tree(3, 1, ((0, 1, 2),), (0, 1, 2))
    tree_is_built(TreeBuild(batch_of(tree, lengths=(5,))))
    assert tree.parents == [-1, 0, 0, 0]


@pytest.mark.parametrize("mode", [FULL, QLEN])
def test_a_node_whose_parent_was_not_selected_is_linked_to_nothing_and_sees_itself_alone(mode: int) -> None:
    """EAGLE cannot select one. SGLang's Triton kernel stays in bounds: no link leads to the node, so that it is never accepted;
    it sees the prefix and itself, not the root, and its position says depth 1 where it has depth 2."""
    good, orphan = Tree(2, 2, ((0, 1), (2, 3)), (0, 2)), Tree(2, 2, ((0, 1), (2, 3)), (0, 4))  # 4 is a child of 1
    with pytest.raises(ValueError, match="candidate 4 was selected, and its parent 1 was not"):
        assert orphan.parents
    mask, positions, _, first, sibling, _ = build(TreeBuild(batch_of(orphan, good, lengths=(1, 1)), mode))
    assert (first[0].tolist(), sibling[0].tolist()) == ([1, -1, -1], [-1, -1, -1])
    assert positions.tolist() == [1, 2, 2, 1, 2, 3]
    width = 4 if mode == FULL else 3
    seen = mask.view(2, 3, width)[:, :, -3:].int().tolist()
    assert seen == [[[1, 0, 0], [1, 1, 0], [1, 0, 1]], [[1, 0, 0], [1, 1, 0], [1, 1, 1]]]


def test_the_bit_packed_mask_is_refused_not_ignored() -> None:
    """The CUDA kernel writes it; the Triton twin's caller raises, as no output would be right."""
    batch = batch_of(Tree(1, 2, ((0,), (1,)), (0, 1)), lengths=(4,))
    with pytest.raises(NotImplementedError, match="QLEN_ONLY_BITPACKING"):
        build(TreeBuild(batch, BITS))


def test_the_kernel_itself_takes_the_bit_packed_mode_for_the_unpacked_one(runtime: str) -> None:
    """So the caller's refusal is all there is: nodes * nodes cells go into a buffer of one integer a node, which the first
    request overruns. Were the buffer longer, every node's integer would be 0 or 1."""
    tree = Tree(1, 2, ((0,), (1,)), (0, 1))
    batch = batch_of(tree, lengths=(4,))
    links = [torch.full((1, 3), -1) for _ in range(3)]

    def launch(mask: Tensor) -> None:
        load(TREE).sgl_build_tree_kernel_efficient_triton[(1,)](
            *(batch.parent_list, batch.selected, torch.tensor([4]), torch.tensor([0]), mask, torch.zeros(3).long(), *links),
            topk=1,
            depth=2,
            draft_token_num=3,
            tree_mask_mode=BITS,
            batch_size=1,
            parent_list_stride=2,
            selected_index_stride=2,
        )

    if runtime != "interpreter":  # which would write there
        with pytest.raises(OutOfBounds):
            launch(torch.zeros(3, dtype=torch.uint8))
    mask = torch.zeros(9, dtype=torch.uint8)
    launch(mask)
    assert mask[:3].tolist() == [1, 0, 0] != packed_mask(tree.parents) == [1, 3, 7]


@pytest.mark.parametrize("seed", range(3))
def test_a_tree_whose_every_candidate_is_a_node(seed: int) -> None:
    tree = grow(Random(seed), 3, 2, 13)
    tree_is_built(TreeBuild(batch_of(tree, tree, lengths=(0, 7))))
