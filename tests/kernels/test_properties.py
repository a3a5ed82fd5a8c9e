"""Properties of small functions and kernels: slots, rows that move, trees, what is drafted, verified and committed."""

from random import Random
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from eagletwin.harness.commands.kernels.properties import (
    cache_locs,
    commit,
    kv_indices,
    kv_move,
    rotate,
    sampling,
    select,
    tree,
    two_ways,
)
from eagletwin.harness.commands.kernels.properties.cache_locs import (
    Draft,
    Requests,
    assign,
    draft_arguments,
    draft_slots_are_contiguous,
)
from eagletwin.harness.commands.kernels.properties.commit import (
    Tracked,
    Verified,
    Window,
    chain_verify_is_committed,
    draft_extend_gets_its_inputs,
    draft_extend_gets_its_layout,
    rows_come_to_the_front,
)
from eagletwin.harness.commands.kernels.properties.kv_indices import Reads, steps_read_prefix_and_branch
from eagletwin.harness.commands.kernels.properties.kv_move import (
    AcceptedBatch,
    accept,
    mla_pool,
    path_moves_in_mha_pool,
    reachable,
)
from eagletwin.harness.commands.kernels.properties.rotate import Rotation, ids_rotate
from eagletwin.harness.commands.kernels.properties.sampling import Decided, SamplingCase, call
from eagletwin.harness.commands.kernels.properties.select import INF, NAN, Growth, tree_grows
from eagletwin.harness.commands.kernels.properties.tree import BITS, FULL, QLEN, TreeBuild, build, check_path, tree_is_built
from eagletwin.harness.commands.kernels.release import POOLS, SAMPLER, SAMPLING, SPEC, TOPK1, TREE, UTILS, WORKER, load, module
from eagletwin.harness.commands.kernels.trees import Batch, Tree, grow
from eagletwin.harness.engines.triton_cpu import KernelViolation, OutOfBounds
from eagletwin.reference.sampling import target_distribution
from eagletwin.reference.tree import move_rows, packed_mask, walk_greedy

from .cuts import make_tests

# What follows a verified path: bonus tokens, lengths, compaction, and the inputs and layout of draft extend.


test_property, test_planted_fault_is_caught = make_tests(commit)


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


# Which slots each stage writes: of draft decode by branch and step, with and without pages; of verify and draft extend.


test_property_of_cache_locs, test_planted_fault_is_caught_of_cache_locs = make_tests(cache_locs)


def test_the_buffer_of_all_steps_has_an_entry_for_each_step_and_branch() -> None:
    """PR #26239: one step's slots handed over in the place of all steps' are refused."""
    with pytest.raises(AssertionError, match=r"2\*3\*4=24"):
        load(UTILS).per_step_draft_out_cache_loc(torch.arange(6), 2, 3, 4)


def test_more_slots_than_one_block_of_the_kernel() -> None:
    """128 lanes: topk * num_steps is larger in wide trees."""
    draft_slots_are_contiguous(Draft(Requests((0, 3), (5, 2)), 8, 14))


def test_a_batch_of_nothing_has_no_slots_without_pages_and_cannot_be_asked_for_any_with_pages() -> None:
    """The copies of the prefix's partial page ask for the width of no row. SGLang's workers skip idle batches before this."""
    assert assign(Draft(Requests((), ()), 2, 2, 1))[0].tolist() == []
    assert load(UTILS).per_step_draft_out_cache_loc(torch.empty(0), 0, 2, 3).shape == (3, 0)
    with pytest.raises(RuntimeError, match="ambiguous"):
        load(WORKER).prepare_for_draft(*draft_arguments(Draft(Requests((), ()), 2, 2, 4), []))


# Which slots each branch of each draft step reads, as the attention backends are given them.


test_property_of_kv_indices, test_planted_fault_is_caught_of_kv_indices = make_tests(kv_indices)


def test_a_prefix_longer_than_one_block_of_the_kernel() -> None:
    """128 lanes, or 512 in the form with several programs for one prefix."""
    wide = Requests((100,), (3,))
    for split in (0, 2):
        steps_read_prefix_and_branch(Reads(wide, 2, 3, 4, split=split))


# KV rows that move: an accepted path to the front of its block, in MHA pools, MLA pools and the DSA indexer's cache.


test_property_of_kv_move, test_planted_fault_is_caught_of_kv_move = make_tests(kv_move)


def test_a_pool_without_layers_moves_nothing() -> None:
    """The full-attention part of a model whose layers all have a sliding window."""
    tree = Tree(2, 1, ((0, 1),), (0, 1))
    path_moves_in_mha_pool(AcceptedBatch(Batch(2, 1, 3, (tree,), (5,), 1), layers=0))


def test_a_batch_of_nothing_cannot_be_moved() -> None:
    """SGLang asks for the width of no request's window. Its workers do not call this for an idle batch."""
    with pytest.raises(RuntimeError, match="ambiguous"):
        accept(AcceptedBatch(Batch(2, 1, 3, (), (), 0)), mla_pool())


def test_a_path_moves_through_slots_that_are_read_and_written() -> None:
    """Launches of few rows come one after the other, and none reads what one before it wrote: a path's nodes come in rising
    order, so a target never lies behind its source."""
    tree = Tree(2, 4, ((0, 1), (2, 3), (6, 7), (10, 11)), (0, 1, 2, 6))
    for seed in range(8):
        for chunk in (1, 2, 256):
            path_moves_in_mha_pool(AcceptedBatch(Batch(2, 4, 5, (tree, tree), (5, 5), seed), chunk=chunk))


@pytest.mark.parametrize(("keys", "values", "whole"), [(32, 32, True), (64, 32, True), (32, 33, False), (32, 64, False)])
def test_values_that_need_more_tiles_than_keys_are_moved_in_part(keys: int, values: int, whole: bool) -> None:
    """The launch has as many tiles as the first buffer's row, a key's, needs (128 bytes each at this size). A value's row with
    more keeps the rest of what lay in its slot. No model known to have such rows drafts trees; SGLang does not refuse one."""
    shape = {"head_num": 1, "head_dim": keys, "v_head_dim": values, "layer_num": 1}
    pool = load(POOLS).MHATokenToKVPool(8, 1, torch.float32, **shape, device="cpu", enable_memory_saver=False)
    with reachable(pool):
        pool._init_kv_copy_and_warmup()
        old_keys, old_values = pool.k_buffer[0].clone(), pool.v_buffer[0].clone()
        pool.move_kv_cache(torch.tensor([2]), torch.tensor([5]))
        assert torch.equal(pool.k_buffer[0], move_rows(old_keys, [(5, 2)]))
        assert torch.equal(pool.v_buffer[0][:, :, :32], move_rows(old_values, [(5, 2)])[:, :, :32])
        assert torch.equal(pool.v_buffer[0], move_rows(old_values, [(5, 2)])) == whole
        assert whole or torch.equal(pool.v_buffer[0][:, :, 32:], old_values[:, :, 32:])


# The rotation of input ids in multi-layer EAGLE: each layer consumes, row by row, the token after the layer below's.


test_property_of_rotate, test_planted_fault_is_caught_of_rotate = make_tests(rotate)


def test_a_request_longer_than_many_blocks() -> None:
    ids_rotate(Rotation((70, 1, 0, 9), None))


# What is drafted: the growth of a tree step by step, its re-ranking, and the fused top-1 of a chain.


test_property_of_select, test_planted_fault_is_caught_of_select = make_tests(select)


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


# Building the tree that the target verifies: tokens, positions, mask and links, of trees and of chains; packing of masks.


test_property_of_tree, test_planted_fault_is_caught_of_tree = make_tests(tree)


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


# What SGLang computes in two ways, on the host or in torch and in a kernel.


test_property_of_two_ways, test_planted_fault_is_caught_of_two_ways = make_tests(two_ways)


# Greedy verification of a tree, in the Triton twin of SGLang's CUDA kernel.


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


# Verify that samples: the rejection kernel of a chain, which is Triton, and the sampling of a tree, which on CUDA is C++.
# The C++ has no twin; tests/gpu holds it to `sampled_trees`, and here it is the engine's stand-in for it that is held. What
# a function decided is followed coin by coin (reference/follow_sampling.py): float32 may decide otherwise than float64 only
# where a coin comes within its error of a boundary, and never for a token without probability.


test_property_of_sampling, test_planted_fault_is_caught_of_sampling = make_tests(sampling)


def one(case: SamplingCase, coin: float, final: float) -> Decided:
    """A batch sampled with the same coins throughout."""
    count = len(case.batch.trees)
    coins, finals = torch.full((count, case.batch.nodes), coin, device="cpu"), torch.full((count,), final, device="cpu")
    return call(load(SAMPLING).chain_speculative_sampling_triton, case, coins, finals, case.drafts)


BELOW_ONE = 1 - 2.0**-24  # the largest coin that torch.rand gives
CHAIN = Tree(1, 2, ((0,), (1,)), (0, 1))


def chain_batch(requests: int, seed: int) -> Batch:
    return Batch(1, 2, 3, (CHAIN,) * requests, (0,) * requests, seed)


def test_a_draft_as_likely_as_the_target_thinks_is_always_accepted() -> None:
    case = SamplingCase(chain_batch(20, 4), 64, 2.0, 64, "same")
    assert one(case, BELOW_ONE, 0.5).paths == [[0, 1, 2]] * 20


def test_nothing_is_left_only_for_a_coin_of_one() -> None:
    """Coins are below 1 (seeded ones since 0.5.17). With one of 1 the draft is refused where p = q, nothing is left to draw
    from, and the kernel gives the last token of the vocabulary, of which p may be 0."""
    case = SamplingCase(chain_batch(1, 4), 64, 2.0, 2, "same")
    assert float(case.targets[0, 0, -1]) == 0
    decided = one(case, 1.0, 0.5)
    assert (decided.paths, decided.emitted) == ([[0]], [[63]])


def test_a_coin_next_to_one_may_draw_a_token_without_probability() -> None:
    """The sum of all and the running sum are added up in another order. Where rounding makes coin * sum reach the end of the
    running sum, the last token of the vocabulary is drawn. Coins of torch.rand come so close once in 2 ** 24."""
    case = SamplingCase(chain_batch(60, 5), 1000, 2.0, 500, "same")
    last = [
        float(row[2, -1]) == 0 and tokens[-1] == 999
        for row, tokens in zip(case.targets, one(case, 0.5, BELOW_ONE).emitted, strict=True)
    ]
    assert any(last)


def test_accept_index_is_addressed_by_the_strides_of_retrieve_index(runtime: str) -> None:
    """SGLang gives both the same shape, contiguous: num_draft_tokens is num_steps + 1 for every chain. Where it was not, rows
    would be written next to theirs; here, behind the last."""
    if runtime == "interpreter":  # which would write there
        pytest.skip("the interpreter checks no bounds")
    case = SamplingCase(chain_batch(1, 4), 8, 1.0, 8)
    wide = torch.zeros(1, 3, 2, dtype=torch.int64)
    accepts = torch.full((1, 3), -1, dtype=torch.int32)
    with pytest.raises(KernelViolation):
        load(SAMPLING).chain_speculative_sampling_triton(
            torch.zeros(3, dtype=torch.int32),
            accepts,
            torch.zeros(1, dtype=torch.int32),
            torch.tensor(case.candidates),
            wide[..., 0],
            None,
            None,
            torch.zeros(1, 3),
            torch.zeros(1),
            case.targets,
            case.drafts,
            1.0,
            1.0,
            True,
        )


def test_plain_sampling_cuts_by_top_k_and_top_p_at_once_and_verify_by_one_after_the_other() -> None:
    """Of 0.35, 0.25, 0.2, 0.06 and 0.14 in small parts, top_k 4 and top_p 0.82. Four tokens are needed for 0.82 of the whole:
    prefill may draw the fourth; of the 0.86 that top_k leaves three are enough, and verify never emits the fourth."""
    row = torch.tensor([[0.35, 0.25, 0.2, 0.06, *[0.01] * 14]])
    plain = load(SAMPLER).top_k_top_p_min_p_sampling_from_probs_torch
    limits = torch.tensor([4]), torch.tensor([0.82]), torch.tensor([0.0])
    torch.manual_seed(1)
    drawn = {int(plain(row.clone(), *limits, False, None, torch.tensor([0]))) for _ in range(400)}
    assert drawn == {0, 1, 2, 3}
    verified = target_distribution(row.double().log(), 1.0, 4, 0.82)
    assert verified.nonzero()[:, 1].tolist() == [0, 1, 2]
