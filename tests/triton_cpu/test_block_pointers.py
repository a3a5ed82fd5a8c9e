"""Block pointers, which Triton 3.9 has dropped: what a window of a tensor holds, what lies outside it, and that it is checked.

There is no stock interpreter to compare with, so it is torch that says what is right.
"""

import pytest
import torch

from eagletwin.harness.engines import triton_cpu

from . import kernels as K


@pytest.mark.parametrize("rows", [1, 5, 8, 11])
@pytest.mark.parametrize("columns", [3, 4])
def test_windows_of_a_strided_tensor_are_copied_up_to_its_edge(rows: int, columns: int) -> None:
    source = torch.arange(rows * 7.0).view(rows, 7)[:, :columns]
    target = torch.full((rows, columns), -1, dtype=torch.int32)
    with triton_cpu.installed():
        K.copy_window[(-(-rows // 4),)](source, target, rows, columns, 7, 0, PAD="zero", CHECK=True, R=4, C=4)
    assert torch.equal(target, (2 * source).to(torch.int32))
    assert not triton_cpu.fallbacks()


def test_what_lies_before_the_tensor_is_outside_too() -> None:
    source, target = torch.ones(6, 4), torch.zeros(6, 4)
    with triton_cpu.installed():
        K.copy_window[(1,)](source, target, 6, 4, 4, -2, PAD="zero", CHECK=True, R=4, C=4)
    assert target.sum(1).tolist() == [8, 8, 0, 0, 0, 0]


def test_a_dimension_that_is_not_checked_may_not_be_left() -> None:
    with triton_cpu.installed(), pytest.raises(triton_cpu.OutOfBounds, match="load at offset 24"):
        K.copy_window[(2,)](torch.ones(6, 4), torch.zeros(6, 4), 6, 4, 4, 0, PAD="zero", CHECK=False, R=4, C=4)


def test_without_padding_what_lies_outside_is_undefined() -> None:
    """Nothing of it is stored where the target ends there too; where it goes on, what is stored depends on it."""
    source = torch.ones(6, 4)
    with triton_cpu.installed(triton_cpu.Checks(poison=True, on_fault="record")):
        K.copy_window[(2,)](source, torch.zeros(6, 4), 6, 4, 4, 0, PAD="", CHECK=True, R=4, C=4)
        assert not triton_cpu.faults()
        K.widen_window[(1,)](source, torch.zeros(8, 4), 6, 8, PAD="zero", R=8, C=4)
        assert not triton_cpu.faults()
        K.widen_window[(1,)](source, torch.zeros(8, 4), 6, 8, PAD="", R=8, C=4)
    assert isinstance(triton_cpu.faults()[0], triton_cpu.PoisonLeak)


def test_a_shadow_says_that_there_is_nothing_to_compare_with() -> None:
    source, target = torch.arange(24.0).view(6, 4), torch.zeros(6, 4)
    with triton_cpu.installed(triton_cpu.Checks(shadow=True)):
        K.copy_window[(2,)](source, target, 6, 4, 4, 0, PAD="zero", CHECK=True, R=4, C=4)
    assert torch.equal(target, 2 * source)  # the fast runtime's result stands
    assert "cannot run it" in triton_cpu.fallbacks()["copy_window"]
