"""Every access by an active lane is checked against the tensor that was given; violations say where and what."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagletwin.harness.engines import triton_cpu

from . import kernels as K


def test_a_load_one_past_the_end_names_everything() -> None:
    source, target = torch.arange(8.0), torch.zeros(9)
    with triton_cpu.installed(), pytest.raises(triton_cpu.OutOfBounds) as caught:
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
    with triton_cpu.installed(), pytest.raises(triton_cpu.OutOfBounds, match="store at offset 4"):
        K.store_range[(1,)](target, 1, 4, BLOCK=4)
    assert target.tolist() == [-1] * 4


@pytest.mark.parametrize("at", [-1, 8, 2**40, -(2**40)])
def test_a_scalar_access_is_checked_on_both_sides(at: int) -> None:
    with triton_cpu.installed(), pytest.raises(triton_cpu.OutOfBounds):
        K.load_one[(1,)](torch.zeros(8), torch.zeros(1), at)


def test_inside_the_storage_but_outside_the_view() -> None:
    storage = torch.arange(16.0)
    with triton_cpu.installed():
        K.load_one[(1,)](storage, torch.zeros(1), 12)
        for at in (-1, 4):
            with pytest.raises(triton_cpu.OutOfBounds):
                K.load_one[(1,)](storage[8:12], torch.zeros(1), at)


def test_the_gap_of_a_strided_view_is_outside_it() -> None:
    view = torch.arange(32.0).view(4, 8)[:, :3]
    out = torch.zeros(1)
    with triton_cpu.installed():
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
    with triton_cpu.installed():
        K.load_one[(1,)](torch.arange(12.0).view(3, 4).T, out, 11)
        K.load_one[(1,)](torch.arange(3.0)[:, None].expand(3, 5), out, 2)
        with pytest.raises(triton_cpu.OutOfBounds):
            K.load_one[(1,)](torch.arange(3.0)[:, None].expand(3, 5), out, 3)


def test_masked_off_lanes_may_point_anywhere() -> None:
    with triton_cpu.installed():
        K.copy_range[(1,)](torch.zeros(8), torch.zeros(4), 2**30, 0, BLOCK=4)


def test_an_empty_tensor_has_no_legal_offset() -> None:
    with triton_cpu.installed(), pytest.raises(triton_cpu.OutOfBounds, match="the tensor is empty"):
        K.load_one[(1,)](torch.empty(0), torch.zeros(1), 0)


@settings(max_examples=60, deadline=None)
@given(st.integers(-6, 14), st.integers(0, 8), st.integers(0, 3), st.integers(1, 9))
def test_exactly_the_illegal_ranges_are_refused(start: int, n: int, first: int, size: int) -> None:
    view = torch.arange(20.0)[first : first + size]
    out = torch.full((8,), -1.0)
    legal = n == 0 or (start >= 0 and start + n <= size)
    with triton_cpu.installed():
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
    with triton_cpu.installed(triton_cpu.Checks(shadow=True, races=True, poison=True), pools(k=k, v=v)):
        K.move_raw[(2,)](table, 5, 2, ROW=4)
        assert torch.equal(k[5], k[2]) and torch.equal(v[5], v[2])
        with pytest.raises(triton_cpu.OutOfBounds, match="store at offset 32") as caught:
            K.move_raw[(2,)](table, 8, 2, ROW=4)
    assert caught.value.argument == "pool k" and triton_cpu.fallbacks() == {}


def test_an_unregistered_address_is_a_violation_only_with_a_registry() -> None:
    k = torch.arange(32.0).view(8, 4)
    table = torch.tensor([k.data_ptr()])
    with triton_cpu.installed():
        K.move_raw[(1,)](table, 5, 2, ROW=4)
    assert torch.equal(k[5], k[2])
    registry = pools(k=k)
    registry.forget("k")
    with triton_cpu.installed(None, registry), pytest.raises(triton_cpu.UnregisteredAddress, match="no live pool"):
        K.move_raw[(1,)](table, 5, 2, ROW=4)


def test_a_pool_must_be_contiguous() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        pools(k=torch.zeros(4, 4).T)
