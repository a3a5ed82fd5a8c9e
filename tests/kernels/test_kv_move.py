"""KV rows that move: an accepted path to the front of its block, in MHA pools, MLA pools and the DSA indexer's cache."""

import pytest
import torch

from eagletwin.harness.commands.kernels.properties.kv_move import (
    PROPERTIES,
    AcceptedBatch,
    accept,
    mla_pool,
    path_moves_in_mha_pool,
    reachable,
)
from eagletwin.harness.commands.kernels.release import POOLS, load
from eagletwin.harness.commands.kernels.trees import Batch, Tree
from eagletwin.reference.tree import moved

from .tests_of import make_tests

test_property, test_planted_fault_is_caught = make_tests(PROPERTIES)


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
        assert torch.equal(pool.k_buffer[0], moved(old_keys, [(5, 2)]))
        assert torch.equal(pool.v_buffer[0][:, :, :32], moved(old_values, [(5, 2)])[:, :, :32])
        assert torch.equal(pool.v_buffer[0], moved(old_values, [(5, 2)])) == whole
        assert whole or torch.equal(pool.v_buffer[0][:, :, 32:], old_values[:, :, 32:])
