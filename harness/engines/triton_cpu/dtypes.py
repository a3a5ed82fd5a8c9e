"""The element types of kernels: names for numpy dtypes, stand-ins for pointers and for what numpy lacks, the values that stand
for undefined ones, and bfloat16."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .lanes import align
from .state import STATE, Fill, Unsupported

# Names alone; arithmetic on them is values.py's.

BOOL, I8, I16, I32, I64 = (np.dtype(t) for t in ("?", "i1", "i2", "i4", "i8"))
U8, U16, U32, U64 = (np.dtype(t) for t in ("u1", "u2", "u4", "u8"))
F16, F32, F64 = (np.dtype(t) for t in ("f2", "f4", "f8"))


@dataclass(frozen=True, slots=True, repr=False)
class Opaque:
    """A dtype that numpy lacks (bfloat16, float8): pointers to it can be passed and cast, values not computed."""

    name: str
    itemsize: int

    def __repr__(self) -> str:
        return self.name


@dataclass(slots=True, unsafe_hash=True)
class PointerType:
    """dtype of a pointer, by Triton's names."""

    element_ty: Any
    address_space: int = field(default=1, compare=False)
    const: bool = field(default=False, compare=False)

    def is_ptr(self) -> bool:
        return True


# What undefined values look like: poison constants, noise for differential runs, and zero for comparing with the stock
# interpreter. Also marks torch.empty memory with the poison constants. Used by memory.py (masked-off lanes) and checks.py.

# Floats are quiet NaNs with a payload no arithmetic makes; integers are large, positive and odd, so that they neither
# pass for a count nor index anything that exists.
_BITS = {1: 0x5B, 2: 0x7EA5, 4: 0x7FE5A5A5, 8: 0x7FFDA5A5A5A5A5A5}
_INT_BITS = {1: 0x5B, 2: 0x5EA5, 4: 0x5EADBEA5, 8: 0x5EADBEA55EADBEA5}


def poison_bits(dtype: np.dtype[Any]) -> Any:
    """The poison constant of a dtype as an unsigned numpy scalar of the same size."""
    table = _BITS if dtype.kind == "f" else _INT_BITS
    return np.dtype(f"u{dtype.itemsize}").type(table[dtype.itemsize])


def _constant(dtype: np.dtype[Any]) -> Any:
    return np.zeros(1, BOOL)[0] if dtype == BOOL else np.array([poison_bits(dtype)]).view(dtype)[0]


_POISON = {np.dtype(t): _constant(np.dtype(t)) for t in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")}


def noise(dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    """Large values of both signs (all bits for integers, true for bool, up to the dtype's square root for floats)."""
    rng = STATE.noise
    if dtype == BOOL:
        return np.ones(shape, BOOL)
    if dtype.kind == "f":
        top = float(np.sqrt(float(np.finfo(dtype).max)))
        return (rng.uniform(0.25, 1.0, shape) * top * rng.choice((-1.0, 1.0), shape)).astype(dtype)
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max, shape, dtype=dtype, endpoint=True)


def fill_array(shape: Any, value: Any, dtype: Any) -> Any:
    """np.full without its overhead."""
    result = np.empty(shape, dtype)
    result.fill(value)
    return result


def undefined_value(dtype: Any, shape: tuple[int, ...] | None) -> Any:
    """Fresh undefined value(s) of a dtype: scalar for shape None, else an array; what they hold is STATE.fill."""
    if isinstance(dtype, Opaque):
        dtype = np.dtype(f"u{dtype.itemsize}")
    if STATE.fill is Fill.ZERO:
        return dtype.type(0) if shape is None else np.zeros(shape, dtype)
    if STATE.fill is Fill.POISON:
        return _POISON[dtype] if shape is None else fill_array(shape, _POISON[dtype], dtype)
    return noise(dtype, ())[()] if shape is None else noise(dtype, shape)


# Dtypes whose poison constant may be recognised in memory: 4 bytes and more, and floats of 2.  A program writes a given
# small integer too often for its bits to mean anything.
def recognisable(dtype: Any) -> bool:
    return isinstance(dtype, np.dtype) and (dtype.itemsize >= 4 or dtype.kind == "f")


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a dense CPU tensor with its dtype's poison constant and return it; other tensors stay as they are."""
    if tensor.device.type != "cpu" or not tensor.numel() or tensor.layout is not torch.strided:
        return tensor
    if not tensor.dtype.is_complex and tensor.is_contiguous():
        plain = tensor.detach()
        if tensor.dtype is torch.bfloat16:
            plain.view(torch.int16).fill_(0x7FA5)
        elif tensor.element_size() > 1 or tensor.dtype in (torch.int8, torch.uint8):
            array = plain.numpy()
            if array.dtype in _POISON:
                array.fill(_POISON[array.dtype])
    return tensor


_FACTORIES: tuple[tuple[Any, str], ...] = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
)


def _poisoning(factory: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        return poison(factory(*args, **kwargs))

    return make


@contextmanager
def poison_empty() -> Iterator[None]:
    """While active, torch.empty, empty_like, empty_strided and Tensor.new_empty return poison (uninitialised bool,
    int16 and 8-bit memory is not recognised later).  Not re-entrant across threads; functions bound before entry are
    not affected."""
    before = [(owner, name, getattr(owner, name)) for owner, name in _FACTORIES]
    try:
        for owner, name, factory in before:
            setattr(owner, name, _poisoning(factory))
        yield
    finally:
        for owner, name, factory in before:
            setattr(owner, name, factory)


# Values of bfloat16, which numpy lacks: a block of float32 whose numbers are all bfloat16's, and that says so.
#
# A load widens 16 bits to float32, which is exact. Arithmetic is done in float32 and rounded once, to nearest even, where
# Triton's result type is bfloat16: of two operands of bfloat16, or of one and a Python number (which is rounded first). With
# float32 the result is float32. Division and reductions are float32's, as in Triton. Operations that are not here raise an
# error and do not fall back to the stock interpreter: it computes with the bits of bfloat16 as if they were integers.

BF16 = Opaque("bfloat16", 2)
_NAN = 0x7FA5  # as memory is marked of torch.empty


def to_float32(bits: Any) -> Any:
    """uint16 (or int16) bits to float32."""
    return (np.asarray(bits).view(U16).astype(np.uint32) << np.uint32(16)).view(F32)[()]


def to_bfloat16(values: Any) -> Any:
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
    return Brain(to_float32(to_bfloat16(values)))


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
        left, right = align(left, right)
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
            return np.asarray(to_bfloat16(value.values)).view(dtype)[()]
        return value.values.astype(dtype) if dtype != F32 else value.values
    if dtype != BF16:
        return None
    if bitcast:
        return Brain(to_float32(value))
    if getattr(value, "dtype", F32) == F64:
        raise Unsupported("float64 to bfloat16")  # through float32 it would be rounded twice
    return brain(value)


def undefined_bits(shape: tuple[int, ...]) -> Any:
    """What undefined elements hold: the poison of their type."""
    if STATE.fill is Fill.NOISE:
        return to_bfloat16(undefined_value(F32, shape))
    return np.full(shape, _NAN if STATE.fill is Fill.POISON else 0, U16)[()]
