"""The runtime beside the stock interpreter: the same results, poison, races and shadow."""

import importlib
import os
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime.interpreter import InterpretedFunction

from eagletwin.harness.engines import triton_cpu
from eagletwin.harness.engines.triton_cpu import compiler
from eagletwin.harness.engines.triton_cpu import language as L
from eagletwin.harness.engines.triton_cpu import values as V
from eagletwin.harness.engines.triton_cpu.rewrite import PREFIX
from eagletwin.reference.hashes import positional_coin

from . import kernels as K

# This runtime gives what the stock interpreter gives: integers exactly, floats to the stated bound.

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


@pytest.mark.parametrize("offsets", [torch.int32, torch.int64])
@pytest.mark.parametrize("seeds", [torch.int32, torch.int64])
def test_random_numbers_are_those_of_triton(seeds: torch.dtype, offsets: torch.dtype) -> None:
    """Philox, with which kernels of verification draw."""
    at = torch.tensor([0, 1, 2, 17, 255, 4096, 2**31 - 1, 5], dtype=offsets) << (4 if offsets is torch.int64 else 0)
    seed = torch.tensor([0, 3, -1], dtype=seeds)
    shadowed(K.random_numbers, (3,), seed, at, torch.zeros(27), torch.zeros(27, dtype=torch.int32), BLOCK=8)


def test_the_references_coins_are_tritons_random_numbers() -> None:
    """At positions below 2**31, which is what a row can have."""
    seeds, places = [0, 3, -1, 2**62 + 5, -(2**63)], [0, 1, 2, 17, 255, 4096, 2**31 - 1, 5]
    out, ints = torch.zeros(45), torch.zeros(45, dtype=torch.int32)
    with triton_cpu.installation():
        K.random_numbers[(5,)](torch.tensor(seeds), torch.tensor(places), out, ints, BLOCK=8)
    assert out[:40].tolist() == [positional_coin(seed, place) for seed in seeds for place in places]


def test_a_logarithm_near_1_is_numpys_which_the_interpreter_lacks() -> None:
    values, out = torch.tensor([-1.0, -0.99, -1e-7, 0.0, 1e-30, 0.5, 7.0, 3e38]), torch.zeros(8)
    with triton_cpu.installation():
        K.small_logarithms[(1,)](values, out, BLOCK=8)
    assert triton_cpu.fallbacks() == {}
    torch.testing.assert_close(out, values.log1p(), rtol=2.0**-22, atol=0.0)


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


# Poison, races and shadow: each shown to find its fault, and to stay quiet where nothing is wrong.

POISON = triton_cpu.Checks(poison=True)
RACES = triton_cpu.Checks(races=True)


def source_line(fault: triton_cpu.KernelViolation) -> str:
    with open(fault.file) as lines:
        return lines.readlines()[fault.line - 1].strip()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32, torch.int64, torch.int8])
def test_an_undefined_lane_that_reaches_a_store_is_found(dtype: torch.dtype) -> None:
    out = torch.zeros(1, dtype=dtype)
    with triton_cpu.installation(POISON), pytest.raises(triton_cpu.PoisonLeak) as caught:
        K.sum_undefined[(1,)](torch.ones(4, dtype=dtype), out, 3, BLOCK=4)
    assert (caught.value.kernel, caught.value.argument) == ("sum_undefined", "dst")
    assert source_line(caught.value) == "tl.store(dst, tl.sum(x, 0))"


def test_an_undefined_lane_that_decides_a_branch_is_found() -> None:
    with triton_cpu.installation(POISON), pytest.raises(triton_cpu.PoisonLeak):
        K.branch_undefined[(1,)](torch.ones(8), torch.zeros(1, dtype=torch.int32), 3, BLOCK=8)


def test_an_undefined_address_is_found_without_any_mode() -> None:
    table = torch.tensor([1, 0, 2], dtype=torch.int32)
    with triton_cpu.installation(), pytest.raises(triton_cpu.OutOfBounds):
        K.address_undefined[(1,)](torch.ones(4), table, torch.zeros(4), 3, BLOCK=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32, torch.int64, torch.int8])
def test_undefined_lanes_that_are_masked_away_are_legal(dtype: torch.dtype) -> None:
    out = torch.zeros(5, dtype=torch.float32)
    with triton_cpu.installation(POISON):
        K.masked_away[(1,)](torch.ones(4, dtype=dtype), out, 3, BLOCK=4)
        K.copy_masked[(2,)](torch.ones(7, dtype=dtype), torch.empty(7, dtype=dtype), 7, OTHER=False, BLOCK=4)
    assert out.tolist() == [6, 1, 1, 1, 0]


def test_undefined_float_lanes_are_not_silently_zero() -> None:
    out = torch.zeros(1)
    with triton_cpu.installation():
        K.sum_undefined[(1,)](torch.ones(4), out, 3, BLOCK=4)
    assert out.isnan().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32, torch.int64])
def test_uninitialised_memory_that_reaches_a_store_is_found(dtype: torch.dtype) -> None:
    with triton_cpu.poison_empty():
        source = torch.empty(4, dtype=dtype)
    source[:3] = 1
    out = torch.zeros(4, dtype=dtype)
    with triton_cpu.installation(POISON):
        K.copy_range[(1,)](source, out, 0, 3, BLOCK=4)
        with pytest.raises(triton_cpu.PoisonLeak, match=r"element \(3,\)"):
            K.copy_range[(1,)](source, out, 0, 4, BLOCK=4)


def test_every_factory_of_empty_memory_is_poisoned_and_given_back() -> None:
    before = torch.empty
    with triton_cpu.poison_empty():
        made = [
            torch.empty(3),
            torch.empty_like(torch.zeros(3)),
            torch.empty_strided((3,), (1,)),
            torch.zeros(1).new_empty(3),
        ]
    assert all(tensor.isnan().all() for tensor in made) and torch.empty is before


def test_memory_that_stays_unwritten_is_legal() -> None:
    with triton_cpu.poison_empty():
        out = torch.empty(8)
    with triton_cpu.installation(triton_cpu.Checks(poison=True, races=True, shadow=True)):
        K.copy_range[(1,)](torch.ones(4), out, 0, 4, BLOCK=4)
    assert out[:4].tolist() == [1] * 4 and out[4:].isnan().all()


def test_a_race_is_found_and_names_the_store() -> None:
    with triton_cpu.installation(RACES), pytest.raises(triton_cpu.OrderDependence) as caught:
        K.race[(4,)](torch.zeros(2, dtype=torch.int32), 4)
    assert (caught.value.argument, source_line(caught.value)) == ("out", "tl.store(out + pid // 2, pid)")
    assert "element (0,) is 1 in one order of the programs and 0 in the reverse (2 elements differ)" in caught.value.detail


def test_a_read_of_what_another_program_writes_is_found() -> None:
    with triton_cpu.installation(RACES), pytest.raises(triton_cpu.OrderDependence):
        K.reads_its_neighbour[(4,)](torch.arange(4), 4)


def test_independent_programs_pass_in_any_order() -> None:
    source, out = torch.randn(50), torch.zeros(50)
    with triton_cpu.installation(triton_cpu.Checks(order=3, races=True)):
        K.copy_masked[(7,)](source, out, 50, OTHER=True, BLOCK=8)
    assert torch.equal(source, out)


def test_a_seeded_order_is_random_and_repeatable() -> None:
    def winners(seed: int | None) -> list[int]:
        out = torch.zeros(16, dtype=torch.int32)
        with triton_cpu.installation(triton_cpu.Checks(order=seed)):
            K.race[(32,)](out, 32)
        return out.tolist()

    assert winners(1) == winners(1) != winners(2)
    assert winners(None) == list(range(1, 32, 2))


def test_a_check_that_records_goes_on_with_the_first_result() -> None:
    out = torch.zeros(2, dtype=torch.int32)
    with triton_cpu.installation(triton_cpu.Checks(races=True, on_fault="record")):
        K.race[(4,)](out, 4)
    assert out.tolist() == [1, 3]
    assert [type(fault) for fault in triton_cpu.faults()] == [triton_cpu.OrderDependence]


def test_memory_ends_as_the_first_run_left_it() -> None:
    data = torch.arange(4)
    with triton_cpu.installation(triton_cpu.Checks(races=True, poison=True, shadow=True, on_fault="record")):
        K.reads_its_neighbour[(4,)](data, 4)
    assert data.tolist() == [1, 2, 3, 3]


def plant(monkeypatch: pytest.MonkeyPatch, kernel: Any, wrong: Any) -> None:
    """Make a kernel compile to a wrong function."""
    right = compiler.compile_kernel(kernel.fn)
    fields = {name: getattr(right, name) for name in type(right).__dataclass_fields__}
    monkeypatch.setitem(compiler._cache, kernel.fn, compiler.Compiled(**{**fields, "function": wrong}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_a_wrong_operator_here_is_a_shadow_mismatch(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    right = compiler.compile_kernel(K.double.fn).function
    scope = {
        **right.__globals__,
        PREFIX + "mul": lambda a, b: compiler.RUNTIME[PREFIX + "mul"](a, b) + 1,
    }
    plant(monkeypatch, K.double, type(right)(right.__code__, scope))
    with triton_cpu.installation(SHADOW), pytest.raises(triton_cpu.ShadowMismatch) as caught:
        K.double[(1,)](torch.ones(4, dtype=dtype), torch.zeros(4, dtype=dtype), N=4)
    fault = caught.value
    assert (fault.kernel, fault.argument, fault.program) == ("double", "dst", (0, 0, 0))
    assert "element (0,) is 3" in fault.detail and "and 2" in fault.detail and "(4 elements differ)" in fault.detail


def test_a_leak_shows_against_the_stock_interpreter_only_as_poison() -> None:
    out = torch.zeros(1)
    with triton_cpu.installation(SHADOW):
        K.sum_undefined[(1,)](torch.ones(4), out, 3, BLOCK=4)
    assert out.isnan().item() and triton_cpu.faults() == []


def test_the_unsupported_falls_back_before_any_store_and_is_listed() -> None:
    source, out = torch.randn(8), torch.zeros(8)
    with triton_cpu.installation():
        K.pointer_to_integer[(1,)](source, out, N=8)
        K.double[(1,)](torch.ones(4).to(torch.float8_e5m2), torch.zeros(4).to(torch.float8_e5m2), N=4)
    assert torch.equal(source, out)
    listed = triton_cpu.fallbacks()
    assert set(listed) == {"pointer_to_integer", "double"}
    assert "pointer cast" in listed["pointer_to_integer"] and "float8" in listed["double"]


def test_a_fall_back_is_noted_as_it_comes_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[str] = []
    installing = importlib.import_module(
        "eagletwin.harness.engines.triton_cpu.install"
    )  # a function of the package has its name
    monkeypatch.setattr(installing, "_note_fallback", None)  # put back afterwards
    triton_cpu.watch_fallbacks(lambda kernel, why: noted.append(f"{kernel}: {why}"))
    with triton_cpu.installation():
        for _ in range(2):
            K.pointer_to_integer[(1,)](torch.randn(8), torch.zeros(8), N=8)
    assert len(noted) == 1
    assert "pointer_to_integer: " in noted[0] and "pointer cast" in noted[0]


def test_the_unsupported_after_a_store_is_an_error() -> None:
    with triton_cpu.installation(), pytest.raises(triton_cpu.KernelError, match=r"pointer cast.*after it stored"):
        K.unsupported_late[(1,)](torch.randn(8), torch.zeros(8), N=8)
    assert triton_cpu.fallbacks() == {}


def test_uninstall_gives_kernels_back() -> None:
    stock = InterpretedFunction.run
    triton_cpu.install()
    triton_cpu.install(SHADOW)
    assert InterpretedFunction.run is not stock
    triton_cpu.uninstall()
    triton_cpu.uninstall()
    assert InterpretedFunction.run is stock and triton_cpu.launches() == 0


def test_pre_run_hooks_run_once() -> None:
    calls: list[int] = []
    kernel = InterpretedFunction(K.double.fn)
    kernel.add_pre_run_hook(lambda *args, **kwargs: calls.append(len(args)))
    with triton_cpu.installation(SHADOW):
        kernel[(1,)](torch.ones(4), torch.zeros(4), N=4)
        kernel[(1,)](torch.ones(4).to(torch.float8_e5m2), torch.zeros(4).to(torch.float8_e5m2), N=4)
    assert calls == [2, 2]


def test_precompile_covers_modules_prefixes_and_single_kernels() -> None:
    compiler._cache.clear()
    assert triton_cpu.precompile([K]) == {}
    assert K.double.fn in compiler._cache and K.helper.fn in compiler._cache
    compiler._cache.clear()
    assert triton_cpu.precompile([K.__name__]) == {} and K.race.fn in compiler._cache
    compiler._cache.clear()
    assert triton_cpu.precompile([K.control]) == {} and K.helper.fn in compiler._cache
    assert K.race.fn not in compiler._cache


def test_a_forked_child_inherits_compiled_kernels() -> None:
    triton_cpu.precompile([K.double])
    triton_cpu.install()
    child = os.fork()
    if child == 0:
        out = torch.zeros(4)
        K.double[(1,)](torch.ones(4), out, N=4)
        os._exit(0 if out.tolist() == [2] * 4 and triton_cpu.fallbacks() == {} else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
