"""Block pointers (tl.make_block_ptr): a window of a block's shape over a tensor of some shape and strides. Triton dropped them
in 3.9 and kernels still use them, so there is no stock interpreter to compare with. memory.py asks for the plain pointers and
the mask that such a window means.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .dtypes import I64
from .lanes import aligned, extra
from .state import STATE


class BlockPointer:
    """base + sum((offset + index) * stride) over the dimensions; offsets and shape may differ between lanes."""

    __slots__ = ("base", "block", "offsets", "order", "shape", "strides")

    def __init__(self, base: Any, shape: Any, strides: Any, offsets: Any, block: Any, order: Any) -> None:
        self.base, self.order = base, order
        self.shape, self.strides, self.offsets = tuple(shape), tuple(strides), tuple(offsets)
        self.block = tuple(int(size) for size in block)

    @property
    def dtype(self) -> Any:
        return self.base.dtype

    def plain(self, boundary_check: Any) -> tuple[Any, Any]:
        """Pointers of the block's shape, and which of them lie inside the tensor in the checked dimensions; None: all."""
        checked = boundary_check if isinstance(boundary_check, (tuple, list)) else (boundary_check,)
        places: Any = _lifted(self.base.offsets, len(self.block))
        inside: Any = None
        for axis, (size, stride, offset, length) in enumerate(
            zip(self.block, self.strides, self.offsets, self.shape, strict=True)
        ):
            ones = [1] * len(self.block)
            ones[axis] = size
            index = np.arange(size, dtype=I64).reshape((*extra(), *ones))
            index = index + _lifted(offset, len(self.block))
            step = index * _lifted(stride, len(self.block))
            places = step if places is None else places + step
            if axis in checked:
                here = (index >= 0) & (index < _lifted(length, len(self.block)))
                inside = here if inside is None else inside & here
        return self.base.reshaped(places), inside

    def advanced(self, by: Any) -> BlockPointer:
        """tl.advance."""
        offsets = [sum64(offset, step) for offset, step in zip(self.offsets, by, strict=True)]
        return BlockPointer(self.base, self.shape, self.strides, offsets, self.block, self.order)


def _lifted(value: Any, rank: int) -> Any:
    """A number as int64; one of each lane with as many more axes, so that a block broadcasts with it."""
    if value is None:
        return None
    if isinstance(value, np.ndarray) and value.ndim:
        return value.astype(I64).reshape(value.shape[:1] + (1,) * rank) if STATE.lanes > 1 else value.astype(I64)
    return int(value)


def sum64(x: Any, y: Any) -> Any:
    """x + y as int64: a kernel's own offsets are int32 and may go past it."""
    wide = [value.astype(I64) if isinstance(value, np.ndarray) else int(value) for value in (x, y)]
    first, second = aligned(*wide)
    return first + second


def make_block_ptr(base: Any, shape: Any, strides: Any, offsets: Any, block_shape: Any, order: Any) -> BlockPointer:
    return BlockPointer(base, shape, strides, offsets, block_shape, order)


def advance(base: BlockPointer, offsets: Any) -> BlockPointer:
    return base.advanced(offsets)
