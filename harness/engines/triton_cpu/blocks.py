"""tl's functions over blocks: reductions and scans, and those that rearrange elements without computing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .dtypes import F32, I32, I64, U32, Brain, wide
from .lanes import extra
from .memory import Pointer
from .pools import RawPointer
from .state import STATE
from .values import convert

# tl's reductions and scans over numpy blocks, with Triton's result types: NaN is ignored by max and min, small
# integers are widened to 32 bits.  Called by language.py, which puts these under their tl names.

_add: Any = np.add  # Any: numpy's stubs know keepdims only as a literal
_xor: Any = np.bitwise_xor
_or: Any = np.bitwise_or


def _axis(x: Any, axis: Any) -> Any:
    """axis as numpy counts it: the lane axis (lanes.py) is never folded."""
    if STATE.lanes > 1:
        return tuple(range(1, x.ndim)) if axis is None else int(axis) + (axis >= 0)
    return None if axis is None else int(axis)


def _sum_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    if dtype.kind == "f" or dtype.itemsize >= 4:
        return dtype
    return U32 if dtype.kind == "u" else I32


def sum(input: Any, axis: Any = None, keep_dims: bool = False, dtype: Any = None) -> Any:
    """Sum over axis (None: all); integers below 32 bits and bools in int32/uint32, others wrap in their own type."""
    input = wide(input)
    dtype = dtype or _sum_dtype(input.dtype)
    axis, input, keep = _axis(input, axis), convert(input, dtype), bool(keep_dims)
    if dtype.kind != "f":
        return _add.reduce(input, axis=axis, dtype=dtype, keepdims=keep)
    # numpy adds pairwise along a contiguous last axis and in another order elsewhere.  Always reducing one contiguous
    # block per program, with or without lanes, makes the rounding the same however programs are grouped.
    input = np.ascontiguousarray(input)
    if isinstance(axis, tuple):
        total = _add.reduce(input.reshape(input.shape[0], -1), axis=1, dtype=dtype)
        return total.reshape(total.shape + (1,) * len(axis)) if keep else total
    return _add.reduce(input, axis=axis, dtype=dtype, keepdims=keep)


def _extreme(ufunc: Any, ignoring: Any, best: Callable[..., Any]) -> Callable[..., Any]:
    def reduce(
        input: Any,
        axis: Any = None,
        return_indices: bool = False,
        return_indices_tie_break_left: bool = True,
        keep_dims: bool = False,
    ) -> Any:
        input = wide(input)
        if return_indices:
            index = pick(input, axis, keep_dims=True)
            value = np.take_along_axis(input, index.astype(np.int64), axis=_axis(input, axis))
            return (
                (value, index) if keep_dims else (value.squeeze(_axis(input, axis))[()], index.squeeze(_axis(input, axis))[()])
            )
        if input.dtype.itemsize < 4:
            input = convert(input, F32 if input.dtype.kind == "f" else I32)
        result = ufunc.reduce(input, axis=_axis(input, axis), keepdims=bool(keep_dims))
        if input.dtype.kind == "f" and np.isnan(result).any():
            return ignoring.reduce(input, axis=_axis(input, axis), keepdims=bool(keep_dims))
        return result

    def pick(input: Any, axis: Any, tie_break_left: bool = True, keep_dims: bool = False) -> Any:
        input = wide(input)
        if input.dtype.kind == "f" and np.isnan(input).any():
            worst = -np.inf if ufunc is np.maximum else np.inf
            input = np.where(np.isnan(input), input.dtype.type(worst), input)
        return convert(best(input, axis=_axis(input, axis), keepdims=bool(keep_dims)), I32)

    reduce.pick = pick  # type: ignore[attr-defined]
    return reduce


max = _extreme(np.maximum, np.fmax, np.argmax)
min = _extreme(np.minimum, np.fmin, np.argmin)
argmax: Callable[..., Any] = max.pick  # type: ignore[attr-defined]
argmin: Callable[..., Any] = min.pick  # type: ignore[attr-defined]


def xor_sum(input: Any, axis: Any = None, keep_dims: bool = False) -> Any:
    return _xor.reduce(input, axis=_axis(input, axis), keepdims=bool(keep_dims))


def reduce_or(input: Any, axis: Any, keep_dims: bool = False) -> Any:
    return _or.reduce(input, axis=_axis(input, axis), keepdims=bool(keep_dims))


def _scan(ufunc: Any, input: Any, axis: int, reverse: bool, dtype: Any) -> Any:
    dtype = dtype or _sum_dtype(input.dtype)
    data, axis = convert(input, dtype), _axis(input, axis)
    if reverse:
        return np.flip(ufunc.accumulate(np.flip(data, axis), axis=axis, dtype=dtype), axis)
    return ufunc.accumulate(data, axis=axis, dtype=dtype)


def cumsum(input: Any, axis: int = 0, reverse: bool = False, dtype: Any = None) -> Any:
    return _scan(np.add, input, int(axis), reverse, dtype)


def cumprod(input: Any, axis: int = 0, reverse: bool = False, dtype: Any = None) -> Any:
    return _scan(np.multiply, input, int(axis), reverse, dtype)


def _lanes(inputs: tuple[Any, ...], axis: int) -> tuple[Any, ...]:
    return tuple(np.moveaxis(x, axis, 0) for x in inputs)


def _combine(combine: Callable[..., Any], left: tuple[Any, ...], right: tuple[Any, ...]) -> tuple[Any, ...]:
    result = combine(*left, *right)
    result = result if isinstance(result, tuple) else (result,)
    return tuple(convert(value, x.dtype) for value, x in zip(result, right, strict=True))


def reduce(input: Any, axis: Any, combine_fn: Callable[..., Any], keep_dims: bool = False) -> Any:
    """tl.reduce: combine_fn folded from the left along axis (None: all in row order); tuples reduce together."""
    inputs = input if isinstance(input, tuple) else (input,)
    rank = inputs[0].ndim
    if axis is None:
        inputs, where = tuple(x.ravel() for x in inputs), 0
    else:
        where = int(axis) % rank
    lanes = _lanes(inputs, where)
    result = tuple(x[0] for x in lanes)
    for i in range(1, lanes[0].shape[0]):
        result = _combine(combine_fn, result, tuple(x[i] for x in lanes))
    if keep_dims:
        result = tuple(np.reshape(x, (1,) * rank) if axis is None else np.expand_dims(x, where) for x in result)
    return result if isinstance(input, tuple) else result[0]


def associative_scan(input: Any, axis: int, combine_fn: Callable[..., Any], reverse: bool = False) -> Any:
    """tl.associative_scan: running combine_fn along axis, from the end where reverse; tuples scan together."""
    inputs = input if isinstance(input, tuple) else (input,)
    where = int(axis) % inputs[0].ndim
    lanes = _lanes(inputs, where)
    steps = range(lanes[0].shape[0])
    outputs = tuple(np.empty_like(x) for x in lanes)
    running: tuple[Any, ...] | None = None
    for i in reversed(steps) if reverse else steps:
        here = tuple(x[i] for x in lanes)
        running = here if running is None else _combine(combine_fn, running, here)
        for output, value in zip(outputs, running, strict=True):
            output[i] = value
    result = tuple(np.moveaxis(x, 0, where) for x in outputs)
    return result if isinstance(input, tuple) else result[0]


def histogram(input: Any, num_bins: int, mask: Any = None) -> Any:
    """Counts of 0..num_bins-1 as int32; other values and masked-off lanes are not counted."""
    valid = (input >= 0) & (input < num_bins)
    if mask is not None:
        valid &= mask
    return np.bincount(input[valid], minlength=int(num_bins)).astype(I32)


def sort(x: Any, dim: Any = None, descending: bool = False) -> Any:
    """Sorted along the last axis, as tl.sort."""
    result = np.sort(x, axis=-1)
    return np.flip(result, -1) if descending else result


def topk(x: Any, k: int, dim: Any = None, descending: bool = True) -> Any:
    """The k largest (or smallest where not descending) along the last axis, in that order."""
    return sort(x, descending=descending)[..., : int(k)]


def flip(x: Any, dim: Any = None) -> Any:
    return np.flip(x, -1 if dim is None else int(dim))


# tl's functions that rearrange elements without computing: reshape, broadcast, transpose, join and the like, for
# values and pointers alike.  Called by language.py, which puts these under their tl names.

POINTERS = (Pointer, RawPointer)


def dims(shape: Any) -> tuple[int, ...]:
    return tuple(int(n) for n in (shape if isinstance(shape, (tuple, list)) else (shape,)))


def _map_elements(x: Any, change: Callable[[Any], Any]) -> Any:
    if x.__class__ is Brain:
        return Brain(change(np.asarray(x.values)))
    return x.with_offsets(change(np.asarray(x.offsets))) if isinstance(x, POINTERS) else change(np.asarray(x))


def _spread(shape: tuple[Any, ...]) -> tuple[int, ...]:
    return dims(shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape)


def _lane_shape(v: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """shape with the value's own lane axis; a number is the same in all lanes."""
    return ((v.shape[:1] or (1,)) + shape) if STATE.lanes > 1 else shape


def _broadcast(v: Any, shape: tuple[int, ...]) -> Any:
    if STATE.lanes > 1 and v.ndim:
        v = v.reshape(v.shape[:1] + (1,) * (len(shape) + 1 - v.ndim) + v.shape[1:])
    return np.broadcast_to(v, _lane_shape(v, shape))


def reshape(x: Any, *shape: Any, can_reorder: Any = False) -> Any:
    return _map_elements(x, lambda v: v.reshape(_lane_shape(v, _spread(shape))))


def broadcast_to(x: Any, *shape: Any) -> Any:
    return _map_elements(x, lambda v: _broadcast(v, _spread(shape)))


def broadcast(input: Any, other: Any) -> Any:
    shape = np.broadcast_shapes(*(np.shape(x)[len(extra()) :] for x in (input, other)))
    return broadcast_to(input, shape), broadcast_to(other, shape)


def expand_dims(x: Any, axis: Any) -> Any:
    return _map_elements(x, lambda v: np.expand_dims(v, axis + 1 if STATE.lanes > 1 and axis >= 0 else axis))


def trans(x: Any, *dims: Any) -> Any:
    """Axes in the order dims; reversed without dims (x.T)."""
    return _map_elements(x, lambda v: np.transpose(v, _order(v.ndim, dims)))


def _order(rank: int, dims: tuple[Any, ...]) -> tuple[int, ...]:
    rank -= len(extra())
    order = _spread(dims) if dims else tuple(reversed(range(rank)))
    return (0, *(axis % rank + 1 for axis in order)) if extra() and rank >= 0 else order


def ravel(x: Any, can_reorder: Any = False) -> Any:
    return _map_elements(x, lambda v: v.ravel())


def join(a: Any, b: Any) -> Any:
    return np.stack(np.broadcast_arrays(a, b), axis=-1)


def split(a: Any) -> Any:
    return a[..., 0], a[..., 1]


def interleave(a: Any, b: Any) -> Any:
    joined = join(a, b)
    return joined.reshape((*joined.shape[:-2], -1))


def cat(input: Any, other: Any, can_reorder: Any = False, dim: int = 0) -> Any:
    return np.concatenate([input, other], axis=dim)


def gather(src: Any, index: Any, axis: int) -> Any:
    return np.take_along_axis(src, index.astype(I64), axis=axis)
