"""Memory as a kernel sees it: a tensor's elements as a flat numpy array, and pointers as (memory, element offset).
Every access by an active lane is checked against the tensor's own extent, and against its shape where the view has
gaps. Loads and stores of all kernels end here; what undefined lanes hold is decided by dtypes.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from .dtypes import (
    BF16,
    BOOL,
    I64,
    U16,
    Brain,
    Opaque,
    PointerType,
    fill_array,
    to_bfloat16,
    to_float32,
    undefined_bits,
    undefined_value,
)
from .lanes import align, extra
from .state import STATE, OutOfBounds, Store, Unsupported, where
from .values import convert, ndarray

# Block pointers (tl.make_block_ptr): a window of a block's shape over a tensor of some shape and strides. Triton dropped them
# in 3.9 and kernels still use them, so there is no stock interpreter to compare with. memory.py asks for the plain pointers and
# the mask that such a window means.


class BlockPointer:
    """base + sum((offset + index) * stride) over the dimensions; offsets and shape may differ between lanes."""

    __slots__ = ("base", "block", "offsets", "order", "shape", "strides")

    def __init__(self, base: Any, shape: Any, strides: Any, offsets: Any, block_shape: Any, order: Any) -> None:
        self.base, self.order = base, order
        self.shape, self.strides, self.offsets = tuple(shape), tuple(strides), tuple(offsets)
        self.block = tuple(int(size) for size in block_shape)

    @property
    def dtype(self) -> Any:
        return self.base.dtype

    def plain(self, boundary_check: Any) -> tuple[Any, Any]:
        """Pointers of the block's shape, and which of them lie inside the tensor in the checked dimensions; None: all."""
        checked = boundary_check if isinstance(boundary_check, (tuple, list)) else (boundary_check,)
        places: Any = _lift(self.base.offsets, len(self.block))
        inside: Any = None
        for axis, (size, stride, offset, length) in enumerate(
            zip(self.block, self.strides, self.offsets, self.shape, strict=True)
        ):
            ones = [1] * len(self.block)
            ones[axis] = size
            index = np.arange(size, dtype=I64).reshape((*extra(), *ones))
            index = index + _lift(offset, len(self.block))
            step = index * _lift(stride, len(self.block))
            places = step if places is None else places + step
            if axis in checked:
                here = (index >= 0) & (index < _lift(length, len(self.block)))
                inside = here if inside is None else inside & here
        return self.base.with_offsets(places), inside


def _lift(value: Any, rank: int) -> Any:
    """A number as int64; one of each lane with as many more axes, so that a block broadcasts with it."""
    if value is None:
        return None
    if isinstance(value, np.ndarray) and value.ndim:
        return value.astype(I64).reshape(value.shape[:1] + (1,) * rank) if STATE.lanes > 1 else value.astype(I64)
    return int(value)


def sum64(x: Any, y: Any) -> Any:
    """x + y as int64: a kernel's own offsets are int32 and may go past it."""
    wide = [value.astype(I64) if isinstance(value, np.ndarray) else int(value) for value in (x, y)]
    first, second = align(*wide)
    return first + second


def advance(base: BlockPointer, offsets: Any) -> BlockPointer:
    moved = [sum64(offset, step) for offset, step in zip(base.offsets, offsets, strict=True)]
    return BlockPointer(base.base, base.shape, base.strides, moved, base.block, base.order)


_lowest = np.minimum.reduce
_highest = np.maximum.reduce


class Memory:
    """The elements that one pointer argument may reach: array[0..size-1], and of those only reach[i] where the view
    has gaps."""

    __slots__ = ("address", "array", "dtype", "name", "reach", "size", "tensor")

    def __init__(self, name: str, array: Any, dtype: Any, address: int, tensor: Any = None, reach: Any = None) -> None:
        self.name, self.array, self.dtype, self.address = name, array, dtype, address
        self.tensor, self.reach = tensor, reach
        self.size: int = array.size

    def view(self, dtype: Any) -> Memory:
        """The same bytes as elements of another dtype (a cast pointer); a tail below one element is out of reach."""
        held = np.dtype(f"u{dtype.itemsize}") if isinstance(dtype, Opaque) else dtype
        data = self.array.view(np.uint8)
        array = data[: data.size // held.itemsize * held.itemsize].view(held)
        reach = None
        if self.reach is not None:
            fine = np.repeat(self.reach, self.array.itemsize)[: array.size * held.itemsize]
            reach = fine.reshape(array.size, held.itemsize).all(axis=1)
        return Memory(self.name, array, dtype, self.address, self.tensor, reach)

    def describe(self) -> str:
        """What was given to the kernel, for messages."""
        if self.tensor is None:
            return f"raw memory at {self.address:#x}"
        shape, stride, dtype = tuple(self.tensor.shape), tuple(self.tensor.stride()), str(self.tensor.dtype)[6:]
        text = f"a {dtype} tensor of shape {shape}, stride {stride}"
        return text if str(self.dtype) == dtype else f"{text}, read as {self.dtype}"


class Pointer:
    """base + offsets elements into a memory; offsets is None for a scalar pointer, else an int64 array."""

    __slots__ = ("base", "memory", "offsets")

    def __init__(self, memory: Memory, base: int, offsets: Any = None) -> None:
        self.memory, self.base, self.offsets = memory, base, offsets

    def __add__(self, other: Any) -> Pointer:
        if other.__class__ is ndarray:
            if other.dtype is not I64:
                if other.dtype.kind not in "iub":
                    raise TypeError("pointer offsets must be integers")
                other = other.astype(I64)
            offsets = self.offsets
            if offsets is not None:
                if offsets.ndim != other.ndim:
                    offsets, other = align(offsets, other)
                other = offsets + other
            return Pointer(self.memory, self.base, other)
        return Pointer(self.memory, self.base + other.__index__(), self.offsets)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Pointer:
        return self + (-other.astype(I64) if isinstance(other, (ndarray, np.generic)) else -other)

    def __getitem__(self, key: Any) -> Pointer:
        picked = np.asarray(0 if self.offsets is None else self.offsets, I64)[key]
        if picked.ndim:
            return Pointer(self.memory, self.base, picked)
        return Pointer(self.memory, self.base + int(picked))

    @property
    def dtype(self) -> PointerType:
        return PointerType(self.memory.dtype)

    @property
    def shape(self) -> Any:
        return () if self.offsets is None else self.offsets.shape

    def with_offsets(self, offsets: Any) -> Pointer:
        return Pointer(self.memory, self.base, offsets)

    def cast(self, element: Any) -> Pointer:
        """The pointer with another element type; the byte address is kept."""
        old, new = self.memory.array.itemsize, element.itemsize
        if self.base * old % new or (self.offsets is not None and new > old):
            raise Unsupported("cast of a pointer that is not aligned to its new element")
        offsets = None if self.offsets is None else self.offsets * old // new
        return Pointer(self.memory.view(element), self.base * old // new, offsets)


def _violation(memory: Memory, offsets: Any, verb: str) -> NoReturn:
    """Raise OutOfBounds for the first illegal one of `offsets` (int or array, elements of `memory`)."""
    flat = np.atleast_1d(np.asarray(offsets)).ravel()
    bad = (flat < 0) | (flat >= memory.size)
    if memory.reach is not None:
        bad |= ~memory.reach[np.clip(flat, 0, memory.size - 1)] if memory.size else True
    lanes = bad.nonzero()[0]
    offset = int(flat[lanes[0]])
    legal = f"0..{memory.size - 1}" if memory.size else "none (the tensor is empty)"
    gap = " (inside the extent, but in a gap between the view's rows)" if 0 <= offset < memory.size else ""
    more = f"; {lanes.size} of {flat.size} active lanes" if flat.size > 1 else ""
    raise OutOfBounds(
        f"{verb} offset {offset}{gap}, legal offsets {legal} of {memory.describe()}{more}", argument=memory.name, **where()
    )


def _gather(memory: Memory, base: int, offsets: Any) -> Any:
    """array[base + offsets], every element checked."""
    array = memory.array
    if not offsets.size:
        return array[offsets]
    low = _lowest(offsets, axis=None)
    if base:
        if low < 0 or base < 0 or base > memory.size:
            offsets = offsets + base
            low = low + base
            base = 0
        else:
            array = array[base:]
    if low < 0:
        _violation(memory, offsets, "load at")
    try:
        result = array.take(offsets)  # refuses offsets past the end, so only the low side is checked above
    except IndexError:
        _violation(memory, offsets + base, "load at")
    if memory.reach is not None and not memory.reach[base:].take(offsets).all():
        _violation(memory, offsets + base, "load at")
    return result


def _load_one(memory: Memory, at: int) -> Any:
    if not 0 <= at < memory.size or (memory.reach is not None and not memory.reach[at]):
        _violation(memory, at, "load at")
    return memory.array[at]


def _same_shape(a: Any, b: Any) -> tuple[Any, Any]:
    """Two arrays, each repeated to the shape of both."""
    if a.ndim != b.ndim:
        a, b = align(a, b)
    shape = np.broadcast(a, b).shape
    return _broadcast_copy(a, shape), _broadcast_copy(b, shape)


def _broadcast_copy(x: Any, shape: tuple[int, ...]) -> Any:
    """np.broadcast_to, as a copy: its users flatten it, which would copy too."""
    if x.shape == shape:
        return x
    result = np.empty(shape, x.dtype)
    result[...] = x
    return result


def _as_bool(mask: Any) -> Any:
    """mask as bool values (any integer is true where not zero)."""
    return mask if mask.__class__ is not ndarray or mask.dtype is BOOL else mask != 0


def load(
    pointer: Any,
    mask: Any = None,
    other: Any = None,
    boundary_check: Any = (),
    padding_option: Any = "",
    cache_modifier: Any = "",
    eviction_policy: Any = "",
    volatile: Any = False,
) -> Any:
    """tl.load: values of the active lanes, `other` (default: undefined) in the rest.  Raises OutOfBounds."""
    if pointer.__class__ is BlockPointer:
        if padding_option not in ("", "zero"):
            raise Unsupported(f"padding option {padding_option}")
        pointer, mask = pointer.plain(boundary_check)
        other = 0 if padding_option == "zero" else None
    if pointer.__class__ is not Pointer:
        pointer = pointer.resolve(mask)
    memory, base, offsets = pointer.memory, pointer.base, pointer.offsets
    if memory.dtype.__class__ is Opaque:
        return _load_brain(pointer, mask, other)
    mask = _as_bool(mask)
    if offsets is None and mask.__class__ is not ndarray:
        if mask is None or mask:
            return _load_one(memory, base)
        return undefined_value(memory.dtype, None) if other is None else convert(other, memory.dtype)
    if mask is None:
        return _gather(memory, base, offsets)
    if offsets is None:
        offsets = np.zeros(mask.shape, I64)
    if mask.__class__ is not ndarray:
        mask = np.broadcast_to(np.bool_(mask), offsets.shape)
    elif mask.shape != offsets.shape:
        mask, offsets = _same_shape(mask, offsets)
    active = np.count_nonzero(mask)
    if active == mask.size:
        return _gather(memory, base, offsets)
    if other is None:
        result = undefined_value(memory.dtype, mask.shape)
    elif isinstance(other, ndarray):
        result = np.empty(mask.shape, memory.dtype)
        result[...] = align(mask, other)[1]
    else:
        result = fill_array(mask.shape, other, memory.dtype)
    if active:
        lanes = mask.ravel().nonzero()[0]
        result.ravel()[lanes] = _gather(memory, base, offsets.ravel().take(lanes))
    return result


def _bits(memory: Memory, verb: str) -> Memory:
    """A memory of bfloat16 as its bits."""
    if memory.dtype != BF16:
        raise Unsupported(f"{verb} of {memory.dtype} values")
    return Memory(memory.name, memory.array.view(U16), U16, memory.address, memory.tensor, memory.reach)


def _value_bits(value: Any) -> Any:
    if value.__class__ is Brain:
        return to_bfloat16(value.values)
    if getattr(value, "dtype", None) == np.float64:
        raise Unsupported("float64 to bfloat16")
    return to_bfloat16(value)


def _load_brain(pointer: Pointer, mask: Any, other: Any) -> Brain:
    """The same of bfloat16: its bits are loaded."""
    bits = Pointer(_bits(pointer.memory, "load"), pointer.base, pointer.offsets)
    if mask is None:
        return Brain(to_float32(load(bits)))
    shape = np.broadcast_shapes(np.shape(pointer.offsets) if pointer.offsets is not None else (), np.shape(mask))
    fallback = undefined_bits(shape) if other is None else _value_bits(other)
    return Brain(to_float32(load(bits, mask, fallback)))


def _note_writer(memory: Memory, offsets: Any) -> None:
    """Remember this store if it covers the watched address."""
    assert STATE.watch is not None
    at = (STATE.watch - memory.address) // memory.array.itemsize
    if np.any(np.asarray(offsets) == at):
        spot = where()
        STATE.writer = Store(spot["file"], spot["line"], spot["program"])


def put(memory: Memory, base: int, offsets: Any, value: Any) -> None:
    """Write value (scalar or array of offsets' shape) at base + offsets (int64 array, any rank), every element
    checked first."""
    if not offsets.size:
        return
    if base:
        offsets = offsets + base
    if _lowest(offsets, axis=None) < 0 or _highest(offsets, axis=None) >= memory.size:
        _violation(memory, offsets, "store at")
    if memory.reach is not None and not memory.reach.take(offsets).all():
        _violation(memory, offsets, "store at")
    STATE.stores += 1
    if STATE.watch is not None:
        _note_writer(memory, offsets)
    if STATE.undo is not None:
        STATE.undo.append((memory.array, offsets, memory.array[offsets]))
    memory.array[offsets] = value


def store(
    pointer: Any, value: Any, mask: Any = None, boundary_check: Any = (), cache_modifier: Any = "", eviction_policy: Any = ""
) -> None:
    """tl.store: value (cast to the element type as C does) into the active lanes.  Raises OutOfBounds before writing
    any lane."""
    if pointer.__class__ is BlockPointer:
        pointer, mask = pointer.plain(boundary_check)
    if pointer.__class__ is not Pointer:
        pointer = pointer.resolve(mask)
    memory, base, offsets = pointer.memory, pointer.base, pointer.offsets
    if memory.dtype.__class__ is Opaque:
        store(Pointer(_bits(memory, "store"), base, offsets), _value_bits(value), mask)
        return
    if value.__class__ is Brain:
        value = value.values
    mask = _as_bool(mask)
    if mask is not None and mask.__class__ is not ndarray:
        if not mask:
            return
        mask = None
    if offsets is None and mask is None:
        if isinstance(value, ndarray) and value.size != 1:
            if STATE.lanes == 1 or value.ndim != 1:
                raise ValueError("a block stored through a scalar pointer")
            value = value[-1]  # every lane stores to this one place: the last program's value stays
        if not 0 <= base < memory.size or (memory.reach is not None and not memory.reach[base]):
            _violation(memory, base, "store at")
        STATE.stores += 1
        if STATE.watch is not None:
            _note_writer(memory, base)
        if STATE.undo is not None:
            STATE.undo.append((memory.array, base, memory.array[base]))
        memory.array[base] = convert(value, memory.array.dtype)
        return
    if offsets is None:
        offsets = np.zeros(mask.shape, I64)
    if value.__class__ is not ndarray:
        value = convert(value, memory.array.dtype)
    elif value.shape != offsets.shape:
        value, offsets = _same_shape(value, offsets)
    if mask is not None:
        if mask.shape != offsets.shape:
            mask, offsets = _same_shape(mask, offsets)
            value = _same_shape(value, offsets)[0] if value.__class__ is ndarray else value
        active = np.count_nonzero(mask)
        if active != mask.size:
            if not active:
                return
            lanes = mask.ravel().nonzero()[0]
            offsets = offsets.ravel().take(lanes)
            if value.__class__ is ndarray:
                value = value.ravel().take(lanes)
    put(memory, base, offsets, value)


# tl.atomic_*: read-modify-write of the active lanes, one after the other, returning what each lane found.
# Programs run one at a time, so atomicity itself is free; the order of programs is launch.py's.


def _atomic(combine: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def atomic(pointer: Any, val: Any, mask: Any = None, sem: Any = None, scope: Any = None) -> Any:
        offsets = getattr(pointer, "offsets", None)
        if not isinstance(offsets, ndarray):
            old = load(pointer, mask)
            if mask is None or mask:
                store(pointer, combine(old, convert(val, old.dtype)))
            return old
        active = np.ones(offsets.shape, BOOL) if mask is None else np.broadcast_to(mask, offsets.shape)
        values = np.broadcast_to(val, offsets.shape)
        element = pointer.dtype.element_ty
        old = undefined_value(element, offsets.shape)
        for lane in zip(*active.nonzero(), strict=True):
            here = pointer[lane]
            old[lane] = found = load(here)
            store(here, combine(found, convert(values[lane], found.dtype)))
        return old

    return atomic


def atomic_cas(pointer: Any, cmp: Any, val: Any, sem: Any = None, scope: Any = None) -> Any:
    """Store val in the lanes that hold cmp; returns what was found."""
    offsets = getattr(pointer, "offsets", None)
    if not isinstance(offsets, ndarray):
        old = load(pointer)
        if old == cmp:
            store(pointer, val)
        return old
    wanted, values = np.broadcast_to(cmp, offsets.shape), np.broadcast_to(val, offsets.shape)
    old = np.empty(offsets.shape, pointer.dtype.element_ty)
    for lane in np.ndindex(offsets.shape):
        old[lane] = atomic_cas(pointer[lane], wanted[lane], values[lane])
    return old


atomic_add = _atomic(lambda old, new: old + new)
atomic_max = _atomic(lambda old, new: np.fmax(old, new))
atomic_min = _atomic(lambda old, new: np.fmin(old, new))
atomic_and = _atomic(lambda old, new: old & new)
atomic_or = _atomic(lambda old, new: old | new)
atomic_xor = _atomic(lambda old, new: old ^ new)
atomic_xchg = _atomic(lambda old, new: new)
