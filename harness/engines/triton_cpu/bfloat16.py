"""Values of bfloat16, which numpy lacks: a block of float32 whose numbers are all bfloat16's, and that says so.

A load widens 16 bits to float32, which is exact. Arithmetic is done in float32 and rounded once, to nearest even, where
Triton's result type is bfloat16: of two operands of bfloat16, or of one and a Python number (which is rounded first). With
float32 the result is float32. Division and reductions are float32's, as in Triton. Operations that are not here raise an error
and do not fall back to the stock interpreter: it computes with the bits of bfloat16 as if they were integers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from .dtypes import F32, F64, I16, U16, Opaque
from .fill import undefined
from .lanes import aligned
from .state import STATE, Fill, Unsupported

BF16 = Opaque("bfloat16", 2)
_NAN = 0x7FA5  # as fill.py marks memory of torch.empty


def widened(bits: Any) -> Any:
    """uint16 (or int16) bits to float32."""
    return (np.asarray(bits).view(U16).astype(np.uint32) << np.uint32(16)).view(F32)[()]


def narrowed(values: Any) -> Any:
    """float32 to the uint16 bits of the nearest bfloat16, ties to even; a NaN stays one."""
    bits = np.ascontiguousarray(values, F32).reshape(np.shape(values)).view(np.uint32)
    kept = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(bits.view(F32)), (bits >> np.uint32(16)) | np.uint32(0x40), kept).astype(U16)[()]


class Brain:
    """values: float32 array or scalar, each number one of bfloat16's."""

    __slots__ = ("values",)
    __array_ufunc__ = None  # a numpy operand leaves the operator to this class
    dtype = BF16

    def __init__(self, values: Any) -> None:
        self.values = values
        STATE.brains = True

    @property
    def shape(self) -> Any:
        return np.shape(self.values)

    @property
    def size(self) -> int:
        return int(np.size(self.values))

    def __getitem__(self, key: Any) -> Brain:
        return Brain(np.asarray(self.values)[key])

    def __neg__(self) -> Brain:
        return Brain(-self.values)


def brain(values: Any) -> Brain:
    """float32 (or a number) rounded."""
    return Brain(widened(narrowed(values)))


def _binary(op: Callable[[Any, Any], Any], swapped: bool) -> Callable[[Brain, Any], Any]:
    def apply(self: Brain, other: Any) -> Any:
        left, right, narrow = self.values, other, True
        if isinstance(other, Brain):
            right = other.values
        elif isinstance(other, (bool, int, float)):
            right = brain(other).values
        elif isinstance(other, (np.ndarray, np.generic)):
            if other.dtype != F32:
                raise Unsupported(f"bfloat16 with {other.dtype}")
            narrow = False
        else:
            return NotImplemented
        left, right = aligned(left, right)
        result = op(right, left) if swapped else op(left, right)
        return brain(result) if narrow and op is not operator.truediv else result

    return apply


for _name in ("add", "sub", "mul", "truediv"):
    setattr(Brain, f"__{_name}__", _binary(getattr(operator, _name), swapped=False))
    setattr(Brain, f"__r{_name}__", _binary(getattr(operator, _name), swapped=True))


def wide(value: Any) -> Any:
    """A block of bfloat16 as float32; anything else as it is."""
    return value.values if value.__class__ is Brain else value


def cast(value: Any, dtype: Any, bitcast: bool) -> Any:
    """value.to(dtype), where one of the two is bfloat16; None where neither is."""
    if value.__class__ is Brain:
        if dtype == BF16:
            return value
        if bitcast:
            if dtype not in (I16, U16):
                raise Unsupported(f"bits of bfloat16 as {dtype}")
            return np.asarray(narrowed(value.values)).view(dtype)[()]
        return value.values.astype(dtype) if dtype != F32 else value.values
    if dtype != BF16:
        return None
    if bitcast:
        return Brain(widened(value))
    if getattr(value, "dtype", F32) == F64:
        raise Unsupported("float64 to bfloat16")  # through float32 it would be rounded twice
    return brain(value)


def undefined_bits(shape: tuple[int, ...]) -> Any:
    """What undefined elements hold: see fill.py."""
    if STATE.fill is Fill.NOISE:
        return narrowed(undefined(F32, shape))
    return np.full(shape, _NAN if STATE.fill is Fill.POISON else 0, U16)[()]
