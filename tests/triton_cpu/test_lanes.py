"""Programs that run at once store, bit for bit, what they store one after the other; where they disagree they are
split."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagletwin.harness.engines import triton_cpu
from eagletwin.harness.engines.triton_cpu import compiler, launch
from eagletwin.harness.engines.triton_cpu.lanes import FORGET_AFTER, LARGEST_GROUP, Groupings

from . import kernels as K


def both_ways(kernel: Any, grid: tuple[int, ...], out: torch.Tensor, args: tuple[Any, ...], **constants: Any) -> None:
    """Launch together and one by one: the same bits in `out` (one of args)."""
    compiled = compiler.compiled(kernel.fn)
    assert (compiled.heavy or grid[0] > launch._MANY) and compiled.runs_in_lanes()
    start = out.clone()
    results = []
    for together in (True, False, True):  # the third time with the groups that the first one learned
        out.copy_(start)
        launch.run(launch.bind(compiled, args, constants, grid), together=together)
        results.append(out.clone().view(torch.int32))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 64), min_size=1, max_size=2 * LARGEST_GROUP + 1), st.integers(0, 2**32 - 1))
def test_rows_of_different_length(lengths: list[int], seed: int) -> None:
    source = torch.randn(len(lengths), 64, generator=torch.Generator().manual_seed(seed))
    out = torch.full((len(lengths),), -1.0)
    args = (source, out, torch.tensor(lengths, dtype=torch.int32), 0.7)
    both_ways(K.softmax_rows, (len(lengths),), out, args, N=16)


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 9), st.sampled_from([1, 4, 32]), st.integers(0, 2**32 - 1))
def test_matrices_and_reductions(programs: int, size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(programs, size, size, generator=generator), torch.randn(size, size, generator=generator)
    out = torch.zeros(programs, size, size)
    both_ways(K.products, (programs,), out, (a, b, out, max(1, size - 1)), D=size)
    with triton_cpu.installed(triton_cpu.Checks(shadow=True, races=True, poison=True)):
        K.products[(programs,)](a, b, torch.zeros(programs, size, size), size, D=size)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=launch._MANY + 1, max_size=3 * LARGEST_GROUP), st.integers(0, 2**32 - 1))
def test_many_programs_of_numbers_alone(lengths: list[int], seed: int) -> None:
    table = torch.randint(1, 1000, (len(lengths), 40), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    held = torch.tensor(lengths, dtype=torch.int32)
    room = held.clamp(min=1)  # a row without slots says so in one place
    out = torch.full((int(room.sum()),), -1, dtype=torch.int32)
    both_ways(K.lists_of_slots, (len(lengths),), out, (table, held, room.cumsum(0) - room, out, 40), BLOCK=16)


def test_stores_of_a_group_that_splits_are_taken_back() -> None:
    out = torch.arange(32.0)
    both_ways(K.stores_then_splits, (8,), out, (out, torch.tensor([1, 9, 1, 9, 9, 1, 1, 9]), 5), N=4)
    assert out[4].item() == 15.0


def test_a_group_is_split_where_it_diverges() -> None:
    lengths = torch.tensor([16, 16, 16, 16, 16, 48, 48], dtype=torch.int32)
    args = (torch.zeros(7, 64), torch.zeros(7), lengths, 1.0)
    kernel = compiler.compiled(K.softmax_rows.fn)
    launch._GROUPINGS.known.clear()
    launch.run(launch.bind(kernel, args, {"N": 16}, (7,)))
    assert launch._GROUPINGS.of((kernel.function, (7, 1, 1)), 7).sizes == [5, 2]


def test_as_many_lanes_as_a_block_has_elements() -> None:
    """Numpy would take one for the other."""
    a, b = torch.randn(4, 4, 4), torch.randn(4, 4)
    out = torch.zeros(4, 4, 4)
    both_ways(K.products, (4,), out, (a, b, out, 3), D=4)
    both_ways(K.softmax_rows, (4,), out, (torch.randn(4, 16), out, torch.tensor([16] * 4), 0.7), N=4)


def test_a_violation_names_its_own_program() -> None:
    lengths = torch.tensor([16, 16, 65, 16], dtype=torch.int32)
    with triton_cpu.installed(), pytest.raises(triton_cpu.OutOfBounds) as caught:
        K.softmax_rows[(4,)](torch.zeros(128 + 64), torch.zeros(4), lengths, 1.0, N=16)
    assert caught.value.program == (2, 0, 0)


def test_a_grouping_is_kept_and_then_forgotten() -> None:
    groupings = Groupings()
    first = groupings.of("kernel", 3 * LARGEST_GROUP + 1)
    assert sum(first.sizes) == 3 * LARGEST_GROUP + 1 and max(first.sizes) <= LARGEST_GROUP
    assert all(groupings.of("kernel", 49) is first for _ in range(FORGET_AFTER - 1))
    assert groupings.of("kernel", 49) is not first
