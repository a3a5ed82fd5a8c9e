"""The stand-in for `triton.language` inside compiled kernels: each tl function over numpy scalars and arrays.
Functions keep tl's names and argument order; cache and scheduling hints are accepted and ignored.  What is missing
here but is itself a jit function in Triton is compiled from Triton's source (compiler.py); anything else raises
Unsupported.
"""

from __future__ import annotations

import math as _math
from collections.abc import Callable
from typing import Any

import numpy as np

from . import blocks, dtypes, memory
from .blocks import POINTERS, dims
from .dtypes import BOOL, F16, F32, F64, I8, I16, I32, I64, U8, U16, U32, U64, Opaque, PointerType, fill_array
from .lanes import align, extra, trip_range
from .pools import from_address
from .state import STATE, Unsupported
from .values import add, common_dtype, convert, floordiv, mul, ndarray, sub, typed
from .values import cast as _cast_value


def to(x: Any, dtype: Any, fp_downcast_rounding: Any = None, bitcast: bool = False) -> Any:
    """x.to(dtype) / tl.cast: values by C casts, integers to raw pointers, pointers to other elements."""
    if isinstance(dtype, PointerType):
        element = dtype.element_ty
        return x.cast(element) if isinstance(x, POINTERS) else from_address(x, element)
    if isinstance(x, POINTERS):
        raise Unsupported("a pointer cast to an integer")
    if fp_downcast_rounding not in (None, "rtne"):
        raise Unsupported(f"rounding {fp_downcast_rounding}")
    return _cast_value(x, dtype, bool(bitcast))


def program_id(axis: int) -> Any:
    return STATE.ids[axis]


def num_programs(axis: int) -> Any:
    return np.int32(STATE.grid[axis])


_aranges: dict[tuple[int, int, bool], Any] = {}


def arange(start: int, end: int) -> Any:
    """int32 start..end-1; shared and read-only, since values are never changed in place."""
    lanes = STATE.lanes > 1
    found = _aranges.get((start, end, lanes))
    if found is None:
        found = np.arange(start, end, dtype=np.int32)
        found = found[None] if lanes else found
        found.setflags(write=False)
        _aranges[int(start), int(end), lanes] = found
    return found


def _new_shape(shape: Any) -> tuple[int, ...]:
    shape = dims(shape)
    return (*extra(), *shape) if shape else shape


def full(shape: Any, value: Any, dtype: Any = None) -> Any:
    if isinstance(dtype, Opaque):
        return _cast_value(full(shape, value, F32), dtype)
    value = typed(value)
    dtype = value.dtype if dtype is None else dtype
    return fill_array(_new_shape(shape), convert(value, dtype), dtype)[()]


def zeros(shape: Any, dtype: Any) -> Any:
    if isinstance(dtype, Opaque):
        return _cast_value(zeros(shape, F32), dtype)
    return np.zeros(_new_shape(shape), dtype)[()]


def zeros_like(input: Any) -> Any:
    if input.__class__ is dtypes.Brain:
        return dtypes.Brain(zeros_like(input.values))
    return np.zeros_like(input)[()]


_LARGE = 1024  # elements from which filling and copying is faster than np.where


def where(condition: Any, x: Any, y: Any) -> Any:
    """x where condition else y, in Triton's common type of x and y; pointers may be selected by a scalar condition."""
    if isinstance(x, POINTERS) or isinstance(y, POINTERS):
        if isinstance(condition, ndarray):
            raise Unsupported("a block condition between pointers")
        return x if condition else y
    if dtypes.Brain in (x.__class__, y.__class__):
        return _where_brain(condition, x, y)
    dtype = common_dtype(x, y)
    if condition.__class__ is not ndarray:
        chosen = convert(x if condition else y, dtype)
        shape = np.broadcast_shapes(np.shape(x), np.shape(y))
        return chosen if np.shape(chosen) == shape else np.broadcast_to(chosen, shape)
    if condition.dtype is not BOOL:
        condition = condition != 0
    condition, x, y = align(condition, convert(x, dtype), convert(y, dtype))
    if (
        x.__class__ is ndarray
        and x.size >= _LARGE
        and (y.__class__ is not ndarray or y.shape == x.shape)
        and (condition.shape == x.shape or np.broadcast(condition, x).shape == x.shape)
    ):
        result = fill_array(x.shape, y, dtype) if y.__class__ is not ndarray else y.copy()
        np.copyto(result, x, where=condition)
        return result
    return np.where(condition, x, y)


def _where_brain(condition: Any, x: Any, y: Any) -> Any:
    """The same where one of the two is bfloat16: with another, or a Python number, the result is too; else float32."""
    chosen = where(condition, *(dtypes.wide(_cast_value(v, dtypes.BF16) if _is_weak(v) else v) for v in (x, y)))
    return dtypes.Brain(chosen) if all(v.__class__ is dtypes.Brain or _is_weak(v) for v in (x, y)) else chosen


def _is_weak(value: Any) -> bool:
    return isinstance(value, (bool, int, float))


def _pair(floats: Any, integers: Any) -> Callable[..., Any]:
    def choose(x: Any, y: Any, propagate_nan: Any = None) -> Any:
        dtype = common_dtype(x, y)
        return (floats if dtype.kind == "f" else integers)(*align(convert(x, dtype), convert(y, dtype)))

    return choose


minimum = _pair(np.fmin, np.minimum)
maximum = _pair(np.fmax, np.maximum)


def clamp(x: Any, min: Any, max: Any, propagate_nan: Any = None) -> Any:
    return minimum(maximum(x, min), max)


def cdiv(x: Any, div: Any) -> Any:
    return floordiv(add(x, sub(div, 1)), div)


def dot(
    input: Any,
    other: Any,
    acc: Any = None,
    input_precision: Any = None,
    allow_tf32: Any = None,
    max_num_imprecise_acc: Any = None,
    out_dtype: Any = F32,
) -> Any:
    """Matrix product in out_dtype (int32 for integers, float64 for float64), plus acc."""
    input, other = dtypes.wide(input), dtypes.wide(other)  # products of two are exact in float32
    dtype = acc.dtype if acc is not None else I32 if input.dtype.kind in "iu" else F64 if input.dtype == F64 else out_dtype
    # One contiguous matrix per program, with or without lanes: the same BLAS call, hence the same rounding.
    product = np.matmul(np.ascontiguousarray(input), np.ascontiguousarray(other), dtype=dtype)
    return product if acc is None else product + acc


def _unary(function: Callable[[Any], Any]) -> Callable[..., Any]:
    def apply(x: Any) -> Any:
        x = typed(x)
        if x.dtype.kind != "f":
            raise TypeError(f"expected a float, got {x.dtype}")
        return function(x)

    return apply


_erf = np.vectorize(_math.erf, otypes=[np.float64])


def abs(x: Any) -> Any:
    return np.abs(typed(x))


def fma(x: Any, y: Any, z: Any) -> Any:
    """x * y + z rounded once (through float64, whose second rounding shows in one result of some 2**29)."""
    x, y, z = align(x, y, z)
    dtype = common_dtype(common_dtype(x, y).type(0), z)
    if dtype == F64:
        raise Unsupported("fma of float64")
    return convert(np.multiply(x, y, dtype=np.float64) + np.asarray(z, np.float64), dtype)


def to_tensor(x: Any) -> Any:
    """A Python number as a scalar of Triton's type for it."""
    return typed(x)


def _wrapping(operation: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """tl.add, tl.sub and tl.mul. Integers wrap here in any case, as where `sanitize_overflow` is off."""

    def function(x: Any, y: Any, sanitize_overflow: Any = True) -> Any:
        return operation(x, y)

    return function


def umulhi(x: Any, y: Any) -> Any:
    dtype = common_dtype(x, y)
    if dtype.itemsize != 4:
        raise Unsupported("umulhi of other than 32 bits")
    x, y = align(convert(x, U32), convert(y, U32))
    wide = convert(x, U64) * convert(y, U64)
    return convert(wide >> np.uint64(32), dtype)


def div_rn(x: Any, y: Any) -> Any:
    dtype = common_dtype(x, y, True)
    return np.divide(*align(convert(x, dtype), convert(y, dtype)))


def fdiv(x: Any, y: Any, ieee_rounding: Any = False) -> Any:
    return div_rn(x, y)


def int_range(*bounds: Any, **hints: Any) -> range:
    """range, tl.range and tl.static_range: bounds may be numpy integers; hints such as num_stages are ignored."""
    step = hints.get("step")
    return trip_range(*bounds, *(() if step is None else (step,)))


def _hint(x: Any, *_: Any, **__: Any) -> Any:
    return x


def _nothing(*_: Any, **__: Any) -> None:
    return None


def static_assert(cond: Any, msg: Any = "") -> None:
    if not cond:
        raise AssertionError(msg)


def assume(cond: Any) -> None:
    if not np.all(cond):
        raise AssertionError("assume failed")


DTYPES: dict[str, Any] = {
    "int1": BOOL,
    **{dtype.name: dtype for dtype in (I8, I16, I32, I64, U8, U16, U32, U64, F16, F32, F64)},
    "bfloat16": dtypes.BF16,
    **{f"float8{kind}": Opaque(f"float8{kind}", 1) for kind in ("e4nv", "e5", "e4b8", "e4b15", "e5b16")},
}

_NUMPY = (np.exp, np.exp2, np.log, np.log1p, np.log2, np.sin, np.cos, np.sqrt, np.floor, np.ceil)
_HERE: tuple[Callable[..., Any], ...] = (
    *(program_id, num_programs, arange, full, zeros, zeros_like, where, clamp, cdiv, dot, abs),
    *(fma, to_tensor, umulhi, div_rn, fdiv, static_assert, assume, memory.load, memory.store, memory.advance),
    *(blocks.reshape, blocks.broadcast_to, blocks.broadcast, blocks.expand_dims, blocks.trans, blocks.ravel),
    *(blocks.join, blocks.split, blocks.interleave, blocks.cat, blocks.gather),
    *(blocks.sum, blocks.xor_sum, blocks.reduce_or, blocks.cumsum, blocks.cumprod, blocks.reduce),
    *(blocks.associative_scan, blocks.histogram, blocks.sort, blocks.topk, blocks.flip),
)
_ATOMICS = ("add", "max", "min", "and", "or", "xor", "xchg", "cas")

NAMES: dict[str, Any] = {
    **DTYPES,
    **{function.__name__: _unary(function) for function in _NUMPY},
    "sqrt_rn": _unary(np.sqrt),
    "rsqrt": _unary(lambda x: 1 / np.sqrt(x)),
    "sigmoid": _unary(lambda x: 1 / (1 + np.exp(-x))),
    "erf": _unary(lambda x: _erf(x).astype(x.dtype)[()]),
    **{function.__name__: function for function in _HERE},
    **{operation.__name__: _wrapping(operation) for operation in (add, sub, mul)},
    "minimum": minimum,
    "maximum": maximum,
    "max": blocks.max,
    "min": blocks.min,
    "argmax": blocks.argmax,
    "argmin": blocks.argmin,
    **{f"atomic_{op}": getattr(memory, f"atomic_{op}") for op in _ATOMICS},
    "make_block_ptr": memory.BlockPointer,
    "cast": to,
    "permute": blocks.trans,
    "view": blocks.reshape,
    "pointer_type": PointerType,
    "range": int_range,
    "static_range": int_range,
    **dict.fromkeys(("constexpr", "multiple_of", "max_contiguous", "max_constancy"), _hint),
    **dict.fromkeys(("debug_barrier", "static_print", "device_print", "device_assert"), _nothing),
}
