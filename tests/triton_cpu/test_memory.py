"""Memory that lanes access, block pointers, programs that run at once, and bfloat16."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagletwin.harness.engines import triton_cpu
from eagletwin.harness.engines.triton_cpu import compiler, launch
from eagletwin.harness.engines.triton_cpu.dtypes import to_bfloat16, to_float32
from eagletwin.harness.engines.triton_cpu.lanes import FORGET_AFTER, LARGEST_GROUP, Groupings

from . import kernels as K

# Every access by an active lane is checked against the tensor that was given; violations say where and what.


def test_a_load_one_past_the_end_names_everything() -> None:
    source, target = torch.arange(8.0), torch.zeros(9)
    with triton_cpu.installation(), pytest.raises(triton_cpu.OutOfBounds) as caught:
        K.copy_masked[(3,)](source, target, 9, OTHER=True, BLOCK=4)
    fault = caught.value
    assert (fault.kernel, fault.argument, fault.program) == ("copy_masked", "src", (2, 0, 0))
    assert fault.file.endswith("kernels.py")
    with open(fault.file) as lines:
        assert "tl.load(src + offs, mask=offs < n, other=0)" in lines.readlines()[fault.line - 1]
    assert "load at offset 8, legal offsets 0..7" in fault.detail
    assert triton_cpu.faults() == [fault]


def test_a_store_out_of_bounds_writes_nothing() -> None:
    target = torch.full((4,), -1, dtype=torch.int32)
    with triton_cpu.installation(), pytest.raises(triton_cpu.OutOfBounds, match="store at offset 4"):
        K.store_range[(1,)](target, 1, 4, BLOCK=4)
    assert target.tolist() == [-1] * 4


@pytest.mark.parametrize("at", [-1, 8, 2**40, -(2**40)])
def test_a_scalar_access_is_checked_on_both_sides(at: int) -> None:
    with triton_cpu.installation(), pytest.raises(triton_cpu.OutOfBounds):
        K.load_one[(1,)](torch.zeros(8), torch.zeros(1), at)


def test_inside_the_storage_but_outside_the_view() -> None:
    storage = torch.arange(16.0)
    with triton_cpu.installation():
        K.load_one[(1,)](storage, torch.zeros(1), 12)
        for at in (-1, 4):
            with pytest.raises(triton_cpu.OutOfBounds):
                K.load_one[(1,)](storage[8:12], torch.zeros(1), at)


def test_the_gap_of_a_strided_view_is_outside_it() -> None:
    view = torch.arange(32.0).view(4, 8)[:, :3]
    out = torch.zeros(1)
    with triton_cpu.installation():
        K.load_one[(1,)](view, out, 8)
        assert out.item() == 8.0
        with pytest.raises(triton_cpu.OutOfBounds, match="in a gap"):
            K.load_one[(1,)](view, out, 3)
        with pytest.raises(triton_cpu.OutOfBounds, match="in a gap"):
            K.copy_range[(1,)](view, torch.zeros(4), 0, 4, BLOCK=4)
        with pytest.raises(triton_cpu.OutOfBounds, match="in a gap"):
            K.store_range[(1,)](view, 0, 4, BLOCK=4)


def test_transposed_and_expanded_views_have_no_gap() -> None:
    out = torch.zeros(1)
    with triton_cpu.installation():
        K.load_one[(1,)](torch.arange(12.0).view(3, 4).T, out, 11)
        K.load_one[(1,)](torch.arange(3.0)[:, None].expand(3, 5), out, 2)
        with pytest.raises(triton_cpu.OutOfBounds):
            K.load_one[(1,)](torch.arange(3.0)[:, None].expand(3, 5), out, 3)


def test_masked_off_lanes_may_point_anywhere() -> None:
    with triton_cpu.installation():
        K.copy_range[(1,)](torch.zeros(8), torch.zeros(4), 2**30, 0, BLOCK=4)


def test_an_empty_tensor_has_no_legal_offset() -> None:
    with triton_cpu.installation(), pytest.raises(triton_cpu.OutOfBounds, match="the tensor is empty"):
        K.load_one[(1,)](torch.empty(0), torch.zeros(1), 0)


@settings(max_examples=60, deadline=None)
@given(st.integers(-6, 14), st.integers(0, 8), st.integers(0, 3), st.integers(1, 9))
def test_exactly_the_illegal_ranges_are_refused(start: int, n: int, first: int, size: int) -> None:
    view = torch.arange(20.0)[first : first + size]
    out = torch.full((8,), -1.0)
    legal = n == 0 or (start >= 0 and start + n <= size)
    with triton_cpu.installation():
        if legal:
            K.copy_range[(1,)](view, out, start, n, BLOCK=8)
            assert out[:n].tolist() == view[start : start + n].tolist()
        else:
            with pytest.raises(triton_cpu.OutOfBounds):
                K.copy_range[(1,)](view, out, start, n, BLOCK=8)


def pools(**tensors: torch.Tensor) -> triton_cpu.LivePools:
    registry = triton_cpu.LivePools()
    for name, tensor in tensors.items():
        registry.register(name, tensor)
    return registry


def test_raw_addresses_are_checked_against_their_pool() -> None:
    k, v = torch.arange(32.0).view(8, 4), torch.arange(32.0).view(8, 4) + 100
    table = torch.tensor([k.data_ptr(), v.data_ptr()])
    with triton_cpu.installation(triton_cpu.Checks(shadow=True, races=True, poison=True), pools(k=k, v=v)):
        K.move_raw[(2,)](table, 5, 2, ROW=4)
        assert torch.equal(k[5], k[2]) and torch.equal(v[5], v[2])
        with pytest.raises(triton_cpu.OutOfBounds, match="store at offset 32") as caught:
            K.move_raw[(2,)](table, 8, 2, ROW=4)
    assert caught.value.argument == "pool k" and triton_cpu.fallbacks() == {}


def test_an_unregistered_address_is_a_violation_only_with_a_registry() -> None:
    k = torch.arange(32.0).view(8, 4)
    table = torch.tensor([k.data_ptr()])
    with triton_cpu.installation():
        K.move_raw[(1,)](table, 5, 2, ROW=4)
    assert torch.equal(k[5], k[2])
    registry = pools(k=k)
    registry.forget("k")
    with triton_cpu.installation(None, registry), pytest.raises(triton_cpu.UnregisteredAddress, match="no live pool"):
        K.move_raw[(1,)](table, 5, 2, ROW=4)


def test_a_pool_must_be_contiguous() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        pools(k=torch.zeros(4, 4).T)


# Block pointers, which Triton 3.9 has dropped: what a window of a tensor holds, what lies outside it, and that it is checked.
# There is no stock interpreter to compare with, so it is torch that says what is right.


@pytest.mark.parametrize("rows", [1, 5, 8, 11])
@pytest.mark.parametrize("columns", [3, 4])
def test_windows_of_a_strided_tensor_are_copied_up_to_its_edge(rows: int, columns: int) -> None:
    source = torch.arange(rows * 7.0).view(rows, 7)[:, :columns]
    target = torch.full((rows, columns), -1, dtype=torch.int32)
    with triton_cpu.installation():
        K.copy_window[(-(-rows // 4),)](source, target, rows, columns, 7, 0, PAD="zero", CHECK=True, R=4, C=4)
    assert torch.equal(target, (2 * source).to(torch.int32))
    assert not triton_cpu.fallbacks()


def test_what_lies_before_the_tensor_is_outside_too() -> None:
    source, target = torch.ones(6, 4), torch.zeros(6, 4)
    with triton_cpu.installation():
        K.copy_window[(1,)](source, target, 6, 4, 4, -2, PAD="zero", CHECK=True, R=4, C=4)
    assert target.sum(1).tolist() == [8, 8, 0, 0, 0, 0]


def test_a_dimension_that_is_not_checked_may_not_be_left() -> None:
    with triton_cpu.installation(), pytest.raises(triton_cpu.OutOfBounds, match="load at offset 24"):
        K.copy_window[(2,)](torch.ones(6, 4), torch.zeros(6, 4), 6, 4, 4, 0, PAD="zero", CHECK=False, R=4, C=4)


def test_without_padding_what_lies_outside_is_undefined() -> None:
    """Nothing of it is stored where the target ends there too; where it goes on, what is stored depends on it."""
    source = torch.ones(6, 4)
    with triton_cpu.installation(triton_cpu.Checks(poison=True, on_fault="record")):
        K.copy_window[(2,)](source, torch.zeros(6, 4), 6, 4, 4, 0, PAD="", CHECK=True, R=4, C=4)
        assert not triton_cpu.faults()
        K.widen_window[(1,)](source, torch.zeros(8, 4), 6, 8, PAD="zero", R=8, C=4)
        assert not triton_cpu.faults()
        K.widen_window[(1,)](source, torch.zeros(8, 4), 6, 8, PAD="", R=8, C=4)
    assert isinstance(triton_cpu.faults()[0], triton_cpu.PoisonLeak)


def test_a_shadow_says_that_there_is_nothing_to_compare_with() -> None:
    source, target = torch.arange(24.0).view(6, 4), torch.zeros(6, 4)
    with triton_cpu.installation(triton_cpu.Checks(shadow=True)):
        K.copy_window[(2,)](source, target, 6, 4, 4, 0, PAD="zero", CHECK=True, R=4, C=4)
    assert torch.equal(target, 2 * source)  # the fast runtime's result stands
    assert "cannot run it" in triton_cpu.fallbacks()["copy_window"]


# Programs that run at once store, bit for bit, what they store one after the other; where they disagree they are split.


def both_ways(kernel: Any, grid: tuple[int, ...], out: torch.Tensor, args: tuple[Any, ...], **constants: Any) -> None:
    """Launch together and one by one: the same bits in `out` (one of args)."""
    compiled = compiler.compile_kernel(kernel.fn)
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
    with triton_cpu.installation(triton_cpu.Checks(shadow=True, races=True, poison=True)):
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
    kernel = compiler.compile_kernel(K.softmax_rows.fn)
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
    with triton_cpu.installation(), pytest.raises(triton_cpu.OutOfBounds) as caught:
        K.softmax_rows[(4,)](torch.zeros(128 + 64), torch.zeros(4), lengths, 1.0, N=16)
    assert caught.value.program == (2, 0, 0)


def test_a_grouping_is_kept_and_then_forgotten() -> None:
    groupings = Groupings()
    first = groupings.of("kernel", 3 * LARGEST_GROUP + 1)
    assert sum(first.sizes) == 3 * LARGEST_GROUP + 1 and max(first.sizes) <= LARGEST_GROUP
    assert all(groupings.of("kernel", 49) is first for _ in range(FORGET_AFTER - 1))
    assert groupings.of("kernel", 49) is not first


# bfloat16, which numpy lacks and the stock interpreter does not compute with: what the runtime makes of it is torch's.


BF16 = torch.bfloat16


def test_rounding_is_to_nearest_even_as_torchs() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    edges = [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F7FFFFF, 1, 0x3F808000, 0x3F818000, 0x3F808001, 0x7F800001]
    values = np.concatenate([bits, np.array(edges, np.uint32)]).view(np.float32)
    theirs = torch.from_numpy(values).to(BF16).float().numpy()
    assert np.array_equal(to_float32(to_bfloat16(values)), theirs, equal_nan=True)


def test_all_numbers_of_bfloat16_are_read_and_kept() -> None:
    every = np.arange(2**16, dtype=np.uint16)
    wide = torch.from_numpy(every.view(np.int16)).view(BF16).float().numpy()
    assert np.array_equal(to_float32(every), wide, equal_nan=True)
    numbers = ~np.isnan(wide)
    assert np.array_equal(to_bfloat16(wide)[numbers], every[numbers])


def test_operators_round_as_torchs_do() -> None:
    n = 16
    torch.manual_seed(0)
    a, b, f = torch.randn(n).to(BF16), torch.randn(n).to(BF16), torch.randn(n)
    narrow, wide = torch.zeros(5, n, dtype=BF16), torch.zeros(5, n)
    with triton_cpu.installation():
        K.brain_ops[(1,)](a, b, f, narrow, wide, 12, N=n)
    assert triton_cpu.fallbacks() == {}
    x = torch.where(torch.arange(n) < 12, a, torch.tensor(0.3).to(BF16))
    chosen = torch.where(torch.arange(n) < 3, x, b)
    assert torch.equal(narrow, torch.stack([x * b, x + b, torch.tensor(0.1).to(BF16) - x, f.to(BF16), chosen * 3]))
    products = (x[:, None] * b[None, :]).float().sum(1)
    squares = (b[:, None] * b[None, :]).float().T
    dots = (x.float()[:, None].expand(n, n) @ squares).sum(1)
    expected = torch.stack([x.float() * f, x.float() / b.float(), products, f.to(BF16).float() - f, dots])
    assert torch.allclose(wide, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("checks", [triton_cpu.Checks(), triton_cpu.Checks(shadow=True)])
def test_what_it_cannot_do_is_an_error_and_never_the_stock_interpreters(checks: Any) -> None:
    with triton_cpu.installation(checks), pytest.raises(triton_cpu.KernelError, match="bfloat16"):
        K.brain_sine[(1,)](torch.ones(8, dtype=BF16), torch.ones(8, dtype=BF16), N=8)
    assert triton_cpu.fallbacks() == {}


def test_masked_lanes_are_undefined() -> None:
    out, source = torch.zeros(1), torch.ones(4, dtype=BF16)
    with triton_cpu.installation():
        K.sum_undefined[(1,)](source, out, 3, BLOCK=4)
    assert out.isnan().item()


def test_a_store_outside_the_tensor_is_seen() -> None:
    with triton_cpu.installation(), pytest.raises(triton_cpu.OutOfBounds):
        K.double[(1,)](torch.ones(8, dtype=BF16), torch.zeros(4, dtype=BF16), N=8)


def test_attention_is_as_exact_as_its_roundings() -> None:
    """SGLang's kernels, in groups of programs and one by one: the same bits, and off by a few roundings of 2**-8."""
    pytest.importorskip("sglang")
    from sglang.kernels.ops.attention import decode_attention, extend_attention

    torch.manual_seed(1)
    heads, groups, width = 4, 2, 16
    q, k, v = (torch.randn(8, n, width).to(BF16) for n in (heads, groups, groups))
    keys, values = (torch.randn(64, groups, width).to(BF16) for _ in range(2))
    slots, ends = torch.randperm(60)[:35], torch.tensor([0, 30, 35], dtype=torch.int32)
    starts = torch.tensor([0, 4, 8], dtype=torch.int32)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """query [N, D]; key, value [T, G, D] -> [N, D]."""
        key, value = (part.double().repeat_interleave(heads // groups, 1) for part in (key, value))
        weight = torch.einsum("nd,tnd->nt", query.double(), key).mul(0.25).softmax(-1)
        return torch.einsum("nt,tnd->nd", weight, value)

    def extended() -> torch.Tensor:
        out = torch.zeros_like(q)
        args = (q, k, v, out, keys, values, starts, ends, slots, None, True, None, 4, 1.0, 1.0)
        extend_attention.extend_attention_fwd(*args, sm_scale=0.25)
        return out

    def decoded() -> torch.Tensor:
        out, partial, sums = torch.zeros(2, heads, width, dtype=BF16), torch.zeros(2, heads, 1, width), torch.zeros(2, heads, 1)
        counts = torch.ones(2, dtype=torch.int32)
        args = (q[:2], keys, values, out, ends, slots, partial, sums, counts, 1, 0.25, 1.0, 1.0)
        decode_attention.decode_attention_fwd(*args)
        return out

    with triton_cpu.installation():
        rows, ones = extended(), decoded()
    with triton_cpu.installation(triton_cpu.Checks(races=True)):  # one by one
        assert torch.equal(rows, extended()) and torch.equal(ones, decoded())
    assert triton_cpu.fallbacks() == {}
    for row in range(8):
        one, _ = divmod(row, 4)
        mine = slots[int(ends[one]) : int(ends[one + 1])]
        fresh = slice(one * 4, row + 1)
        expected = attend(q[row], torch.cat([keys[mine], k[fresh]]), torch.cat([values[mine], v[fresh]]))
        assert (rows[row] - expected).abs().max() < 4 * 2**-8 * expected.abs().max()
    for row in range(2):
        mine = slots[int(ends[row]) : int(ends[row + 1])]
        expected = attend(q[row], keys[mine], values[mine])
        assert (ones[row] - expected).abs().max() < 4 * 2**-8 * expected.abs().max()


def test_what_a_kernel_stores_to_is_known_by_its_source_and_that_of_functions_that_it_calls() -> None:
    pointers = {"src", "dst", "read", "written", "counted"}
    assert triton_cpu.stored_names(K.store_by_another.fn) & pointers == {"written", "counted"}
    assert triton_cpu.stored_names(K.copy_masked.fn) & pointers == {"dst"}
