"""What the taps read out of KV pools, and what they poison again: alike in numpy and in torch, and nothing that is in use."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from eagletwin.harness.core.records import KEY_POISON, VALUE_POISON
from eagletwin.harness.engines.sglang.taps.pools import Allocation, Pool


def pool(dtype: torch.dtype, layers: int = 2) -> SimpleNamespace:
    """9 slots, 2 heads of 3; the number of a key says where it is, and values are larger by 100."""
    keys = [torch.arange(54).reshape(9, 2, 3).to(dtype) + 64 * layer for layer in range(layers)]
    return SimpleNamespace(k_buffer=keys, v_buffer=[rows + 100 for rows in keys])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # numpy reads the one, torch the other
def test_rows_are_those_of_the_slots_in_their_order(dtype: torch.dtype) -> None:
    one = pool(dtype)
    rows = Pool(one).rows(np.array([7, 2, 7]))
    assert rows.shape == (3, 2, 2, 2, 3)
    for n, slot in enumerate((7, 2, 7)):
        for part, buffers in enumerate((one.k_buffer, one.v_buffer)):
            for layer in range(2):
                assert rows[n, part, layer].tolist() == buffers[layer][slot].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_freed_slots_are_poisoned_and_no_others(dtype: torch.dtype) -> None:
    one, before = pool(dtype), pool(dtype)
    Pool(one).poison(np.array([1, 4]), np.array([0, 2, 3]))
    for buffers, old, poison in ((one.k_buffer, before.k_buffer, KEY_POISON), (one.v_buffer, before.v_buffer, VALUE_POISON)):
        for rows, were in zip(buffers, old, strict=True):
            assert rows[[1, 4]].unique().tolist() == torch.tensor([poison]).to(dtype).tolist()
            assert torch.equal(rows[[0, 2, 3, 5, 6, 7, 8]], were[[0, 2, 3, 5, 6, 7, 8]])


def test_of_a_layer_with_slots_of_its_own_those_are_kept_to_which_used_ones_lead() -> None:
    """Free slot 1 leads to 5 as used slot 2 does: what it led to when it was last used."""
    inside, before = pool(torch.float32, 1), pool(torch.float32, 1)
    mapping = torch.tensor([0, 5, 5, 3, 0, 0, 0, 0, 0])
    hybrid = SimpleNamespace(layers_mapping={0: (0, True)}, swa_kv_pool=inside, full_to_swa_index_mapping=mapping)
    Pool(hybrid).poison(np.array([1]), np.array([0, 2, 3]))
    assert torch.equal(inside.k_buffer[0][[0, 3, 5]], before.k_buffer[0][[0, 3, 5]])
    assert inside.k_buffer[0][[1, 2, 4, 6, 7, 8]].unique().tolist() == [KEY_POISON]


def allocation(pages: torch.Tensor, page: int = 1) -> Allocation:
    """8 slots and the page that takes padding."""
    allocator = SimpleNamespace(get_all_free_pages=lambda: pages)
    return Allocation(
        SimpleNamespace(
            token_to_kv_pool_allocator=allocator,
            page_size=page,
            req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(1, 8, dtype=torch.int32)),
            max_total_num_tokens=8,
        )
    )


def test_slots_up_to_the_highest_that_anybody_had_are_freed_ones() -> None:
    one = allocation(torch.tensor([1, 3, 4, 5, 6, 7, 8]))
    free = one.free()
    used = one.used(free)
    assert used.tolist() == [0, 2]
    assert one.freed(free, used).tolist() == [1]
    one.seen(np.array([[5, 1]]))  # taken, written and given back between two looks
    assert one.freed(free, used).tolist() == [1, 3, 4, 5]
    assert one.freed(free, used).tolist() == [1, 3, 4, 5]  # and whenever it is written after that


def test_a_slot_from_outside_the_pool_is_not_poisoned() -> None:
    """It is the judge who says so: pool.accounting, draft.slots."""
    one = allocation(torch.tensor([1, 2, 12]))
    free = one.free()
    one.seen(np.array([12]))
    assert one.freed(free, one.used(free)).tolist() == [1, 2]
