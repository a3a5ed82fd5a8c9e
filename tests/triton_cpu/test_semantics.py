"""This runtime gives what the stock interpreter gives: integers exactly, floats to the stated bound."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagletwin.harness.engines import triton_cpu
from eagletwin.harness.engines.triton_cpu import language as L
from eagletwin.harness.engines.triton_cpu import values as V

from . import kernels as K

SHADOW = triton_cpu.Checks(shadow=True)


def shadowed(kernel: Any, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
    """Launch under shadow; nothing may differ or fall back."""
    with triton_cpu.installation(SHADOW):
        kernel[grid](*args, **kwargs)
    assert triton_cpu.fallbacks() == {}


INT32 = st.integers(-(2**31), 2**31 - 1)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(INT32, INT32.filter(lambda v: v not in (0, -1))), min_size=1, max_size=16), st.booleans())
def test_integer_operators_wrap_and_truncate_as_in_c(pairs: list[tuple[int, int]], wide: bool) -> None:
    dtype = torch.int64 if wide else torch.int32
    a, b = (torch.tensor(column, dtype=dtype) for column in zip(*pairs, strict=True))
    shadowed(K.int_ops, (1,), a, b, torch.zeros(6 * len(pairs), dtype=dtype), len(pairs), BLOCK=16)


def test_bits_of_unsigned_and_signed_integers_meet_as_in_triton() -> None:
    seeds = torch.tensor([3, -1, 2**62 + 5, 131], dtype=torch.int64)
    shadowed(K.hashes, (1,), seeds, torch.tensor([1, 4, 9, 30], dtype=torch.int32), torch.zeros(4, dtype=torch.int64), N=4)


@pytest.mark.parametrize("out", [torch.float32, torch.float64, torch.int64, torch.int32])
def test_mixed_operands_promote_as_in_triton(out: torch.dtype) -> None:
    i32 = torch.tensor([3, -7, 2, 16777217, 0, 5, 9, -1], dtype=torch.int32)
    u32 = i32.abs().numpy().view(np.uint32)
    f32 = torch.tensor([0.1, -2.7, 3.3, 1.5, 7.7, -0.2, 4.9, 100.25])
    result = torch.zeros(104, dtype=out)
    args = (i32, i32.long() * 3, torch.from_numpy(u32), f32.half(), f32, i32 > 2, result, 4, 0.3)
    shadowed(K.mixed_types, (1,), *args)


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("n", [0, 1, 3, 6])
def test_loops_branches_and_device_functions(n: int, flag: bool) -> None:
    source = torch.tensor([4, 3, 9, 7, -2, 8], dtype=torch.int32)
    shadowed(K.control, (2,), source, torch.zeros(17, dtype=torch.int32), n, BLOCK=8, FLAG=flag)


@pytest.mark.parametrize("flag", [True, False])
def test_constexprs_are_python_values_until_they_meet_another(flag: bool) -> None:
    for size in (3, 5, 8):
        out = torch.zeros(2, dtype=torch.int32)
        with triton_cpu.installation():
            K.constants[(1,)](out, 4, FLAG=flag, SIZE=size)
        met = int((size + 4) / -2)
        assert out.tolist() == [0 if flag or size == 3 else size // -2 + size % 3, met]


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([(4, 8), (1, 4), (8, 8)]))
def test_reductions_scans_and_dot(seed: int, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    ints = torch.randint(-9, 9, shape, generator=generator, dtype=torch.int32)
    shadowed(K.reductions, (1,), x, torch.zeros(13 * shape[0]), ints, M=shape[0], N=shape[1])


def test_max_ignores_nan_as_triton_does() -> None:
    x = torch.randn(4, 8)
    x[1, 2] = float("nan")
    x[2, 0] = float("-inf")
    shadowed(K.reductions, (1,), x, torch.zeros(52), torch.zeros(4, 8, dtype=torch.int32), M=4, N=8)


def test_atomics_return_what_they_found() -> None:
    counter, hist = torch.zeros(4, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    data, out = torch.tensor([1, 1, 3, 1, 7], dtype=torch.int32), torch.full((5,), -1, dtype=torch.int32)
    shadowed(K.atomics, (5,), counter, hist, data, out, 5, BLOCK=8)
    assert counter.tolist() == [5, 12, 4, 7]
    assert hist.tolist() == [0, 15, 0, 5, 0, 0, 0, 5]
    assert out.tolist() == [0, 1, 2, 3, 4]


def test_pointers_cast_to_bytes_move_any_dtype() -> None:
    source, target = torch.randn(8).bfloat16(), torch.zeros(8, dtype=torch.bfloat16)
    shadowed(K.cast_bytes, (1,), source, target, N=16)
    assert torch.equal(source, target)


def test_bitcast_keeps_the_bits() -> None:
    shadowed(K.bits, (1,), torch.randn(8), torch.zeros(8, dtype=torch.int32))


@pytest.mark.parametrize("shape", [(), (3,)])
def test_division_and_remainder_of_each_sign(shape: tuple[int, ...]) -> None:
    for a in (-7, 7):
        for b in (-2, 2):
            x, y = np.full(shape, a, np.int32)[()], np.full(shape, b, np.int32)[()]
            assert np.all(V.floordiv(x, y) == int(a / b)) and np.all(V.mod(x, y) == a - b * int(a / b))


def test_constexpr_arithmetic_stays_in_python() -> None:
    assert V.floordiv(-7, 2) == -4 and V.mod(-7, 2) == 1 and type(V.add(1, 2)) is int


def test_int1_wraps() -> None:
    true = np.ones(2, bool)
    assert not V.add(true, true).any() and not V.sub(true, true).any() and V.mul(true, true).all()


def test_a_replaced_global_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = torch.zeros(1, dtype=torch.int32), torch.zeros(17, dtype=torch.int32)
    with triton_cpu.installation():
        K.control[(1,)](source, out, 1, BLOCK=8, FLAG=False)
        before = out.clone()
        monkeypatch.setattr(K, "SCALE", K.tl.constexpr(11))
        K.control[(1,)](source, out, 1, BLOCK=8, FLAG=False)
    assert not torch.equal(before, out)


@pytest.mark.parametrize("size", [16, 4096])
def test_where_is_the_same_in_small_and_large_blocks(size: int) -> None:
    """Large blocks are filled and copied into: whichever of the two is a number, smaller, or of another type."""
    block = np.arange(size, dtype=np.float32).reshape(4, -1)
    row = -block[:1]
    for x, y in ((block, -np.inf), (2.5, block), (block, row), (row, block), (block, -block), (block.astype(np.int64), block)):
        for keep in (block % 3 == 0, block >= 0, block < 0, (block[:1] % 2 == 0)):
            wanted = np.where(keep, x, y).astype(np.float32)
            before = [np.array(value) for value in (x, y)]
            found = L.where(keep, x, y)
            assert found.dtype == np.float32
            np.testing.assert_array_equal(found, wanted)
            for value, kept in zip((x, y), before, strict=True):
                np.testing.assert_array_equal(value, kept)
