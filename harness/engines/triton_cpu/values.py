"""Triton's arithmetic on numpy scalars and arrays: type promotion, C division and remainder, casts. numpy promotes
differently in a few mixes (int32 * float32 is float64, int32 + uint32 is int64), so each operator looks at its
result's dtype and repairs those.  Called by compiled kernels (compiler.py rewrites their operators) and by
language.py.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from . import dtypes
from .dtypes import BOOL, F16, F32, F64, I8, I32, I64, U32, U64, Opaque
from .lanes import align
from .state import Unsupported

ndarray = np.ndarray
i32, i64, f32, bool_ = np.int32, np.int64, np.float32, np.bool_
_KIND = {"b": 0, "i": 1, "u": 1, "f": 2}
_PYTHON = frozenset((bool, int, float))


def both_python(a: Any, b: Any) -> bool:
    """Whether an operation is constexpr arithmetic, which is Python's."""
    return a.__class__ in _PYTHON and b.__class__ in _PYTHON


def scalar_dtype(value: Any) -> np.dtype[Any]:
    """dtype that Triton gives a Python number which meets no tensor."""
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, int):
        if -(2**31) <= value < 2**31:
            return I32
        return U32 if 2**31 <= value < 2**32 else I64 if value < 2**63 else U64
    return F32


def typed(value: Any) -> Any:
    """Python number to the numpy scalar of Triton's type for it; anything else unchanged (assignment of a literal)."""
    cls = value.__class__
    if cls not in _PYTHON:
        return value
    if cls is int:
        return i32(value) if -2147483648 <= value <= 2147483647 else scalar_dtype(value).type(value)
    return f32(value) if cls is float else np.bool_(value)


_promoted: dict[tuple[Any, Any, bool, bool, bool], np.dtype[Any]] = {}


def _promote(da: np.dtype[Any], wa: bool, db: np.dtype[Any], wb: bool, div: bool) -> np.dtype[Any]:
    """TritonSemantic.computation_type_impl; wa/wb: the operand is a Python number and weak."""
    if wa != wb:
        weak, strong = (da, db) if wa else (db, da)
        if _KIND[weak.kind] <= _KIND[strong.kind]:
            da = db = strong
    if F64 in (da, db):
        return F64
    if div and "f" in (da.kind, db.kind):
        return F32
    if F32 in (da, db):
        return F32
    if F16 in (da, db):
        return F16
    rank_a, rank_b = (1 if d is BOOL else d.itemsize * 8 for d in (da, db))
    if (da.kind == "u") == (db.kind == "u"):
        return da if rank_a >= rank_b else db
    if da.kind == "u":
        return da if rank_a >= rank_b else db
    return db if rank_b >= rank_a else da


def common_dtype(a: Any, b: Any, div: bool = False) -> np.dtype[Any]:
    """Triton's computation type of two operands (numpy values or Python numbers); TypeError for anything else."""
    da, db = getattr(a, "dtype", None), getattr(b, "dtype", None)
    if da is db and da is not None and not (div and da is F16):
        return da  # type: ignore[no-any-return]
    wa, wb = da is None, db is None
    if da is None:
        if not isinstance(a, (int, float)):
            raise TypeError(f"no arithmetic on {type(a).__name__}")
        da = scalar_dtype(a)
    if db is None:
        if not isinstance(b, (int, float)):
            raise TypeError(f"no arithmetic on {type(b).__name__}")
        db = scalar_dtype(b)
    key = (da, db, wa, wb, div)
    found = _promoted.get(key)
    if found is None:
        found = _promoted[key] = _promote(da, wa, db, wb, div)
    return found


def convert(value: Any, dtype: np.dtype[Any]) -> Any:
    """value as dtype with C casting (wraps, truncates); Python numbers become scalars."""
    if isinstance(value, (ndarray, np.generic)):
        return value if value.dtype is dtype else value.astype(dtype)
    if value.__class__ is float and dtype.kind == "f":
        return dtype.type(value)
    return np.asarray(value).astype(dtype)[()]


def _repair(op: Callable[[Any, Any], Any], a: Any, b: Any, result: Any) -> Any:
    """result of op(a, b) where numpy's dtype may not be Triton's: recompute in Triton's type if so."""
    if both_python(a, b):
        return result
    want = common_dtype(a, b)
    if want is BOOL and op in _ARITHMETIC:  # int1 wraps like any integer; numpy's bool + is a logical or
        return (op(convert(a, I8), convert(b, I8)) & 1).astype(BOOL)
    if result is not None and result.dtype is want:
        return result
    return op(convert(a, want), convert(b, want))


_ARITHMETIC = (operator.add, operator.sub, operator.mul)


# What numpy gets right needs no look: float32 and int32 results (no wrong mix ends there except int16 with uint16 or
# float16, which do not occur), and int64 where an operand is int64.  Other classes are Python numbers or pointers.
_SUSPECT = frozenset(np.dtype(t).type for t in "?bhBHIQde")


def _to_triton_type(op: Callable[[Any, Any], Any], a: Any, b: Any, result: Any) -> Any:
    """result of op(a, b), in Triton's type."""
    cls = result.__class__
    if cls is ndarray:
        dtype = result.dtype
    elif cls is i64:
        if a.__class__ is i64 or b.__class__ is i64:
            return result
        dtype = I64
    else:
        return _repair(op, a, b, result) if cls in _SUSPECT else result
    if dtype is I64 and (getattr(a, "dtype", None) is I64 or getattr(b, "dtype", None) is I64):
        return result
    return _repair(op, a, b, result)


def add(a: Any, b: Any) -> Any:
    if a.__class__ is ndarray and b.__class__ is ndarray and a.ndim != b.ndim:
        a, b = align(a, b)
    result = a + b
    cls = result.__class__
    if cls is ndarray:
        dtype = result.dtype
        if dtype is I32 or dtype is F32:
            return result
    elif cls not in _SUSPECT or (cls is i64 and (a.__class__ is i64 or b.__class__ is i64)):
        return result
    return _to_triton_type(operator.add, a, b, result)


def sub(a: Any, b: Any) -> Any:
    if getattr(a, "dtype", None) is BOOL and getattr(b, "dtype", None) is BOOL:  # numpy refuses bool - bool
        return _repair(operator.sub, a, b, None)
    if a.__class__ is ndarray and b.__class__ is ndarray and a.ndim != b.ndim:
        a, b = align(a, b)
    result = a - b
    cls = result.__class__
    if cls is ndarray:
        dtype = result.dtype
        if dtype is I32 or dtype is F32:
            return result
    elif cls not in _SUSPECT or (cls is i64 and (a.__class__ is i64 or b.__class__ is i64)):
        return result
    return _to_triton_type(operator.sub, a, b, result)


def mul(a: Any, b: Any) -> Any:
    if a.__class__ is ndarray and b.__class__ is ndarray and a.ndim != b.ndim:
        a, b = align(a, b)
    result = a * b
    cls = result.__class__
    if cls is ndarray:
        dtype = result.dtype
        if dtype is I32 or dtype is F32:
            return result
    elif cls not in _SUSPECT or (cls is i64 and (a.__class__ is i64 or b.__class__ is i64)):
        return result
    return _to_triton_type(operator.mul, a, b, result)


def and_(a: Any, b: Any) -> Any:
    if a.__class__ is ndarray and b.__class__ is ndarray and a.ndim != b.ndim:
        a, b = align(a, b)
    try:
        result = a & b
    except TypeError:  # numpy has no such type: uint64 with signed integers
        return _repair(operator.and_, a, b, None)
    cls = result.__class__
    if cls is bool_ or (cls is ndarray and result.dtype is BOOL):
        return result
    return _to_triton_type(operator.and_, a, b, result)


def _bitwise(op: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def apply(a: Any, b: Any) -> Any:
        a, b = align(a, b)
        try:
            result = op(a, b)
        except TypeError:  # as of and_
            return _repair(op, a, b, None)
        return _to_triton_type(op, a, b, result)

    return apply


or_, xor = _bitwise(operator.or_), _bitwise(operator.xor)
shl, shr = _bitwise(operator.lshift), _bitwise(operator.rshift)


_SIGNED = frozenset((int, bool, i32, i64, bool_))


def _comparison(op: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """op in Triton's common type where the operands' kinds differ: -1 is above 7 as uint32."""

    def compare(a: Any, b: Any) -> Any:
        if a.__class__ in _SIGNED and b.__class__ in _SIGNED:
            return op(a, b)
        a, b = dtypes.wide(a), dtypes.wide(b)
        if a.__class__ is ndarray and b.__class__ is ndarray and a.ndim != b.ndim:
            a, b = align(a, b)
        da, db = getattr(a, "dtype", None), getattr(b, "dtype", None)
        if da is db or da is None or db is None or getattr(da, "kind", "") == getattr(db, "kind", ""):
            return op(a, b)
        dtype = common_dtype(a, b)
        return op(convert(a, dtype), convert(b, dtype))

    return compare


lt, le, gt, ge = (_comparison(op) for op in (operator.lt, operator.le, operator.gt, operator.ge))
eq, ne = (_comparison(op) for op in (operator.eq, operator.ne))


def floordiv(a: Any, b: Any) -> Any:
    """a // b with C truncation; Python's floor for two constexpr numbers, as in Triton."""
    if both_python(a, b):
        return a // b
    want = common_dtype(a, b, True)
    if want.kind == "f":
        raise TypeError("// needs integers")
    a, b = align(convert(a, want), convert(b, want))
    quotient = a // b
    if want.kind == "u":
        return quotient
    if quotient.__class__ is ndarray:
        if quotient.size and np.minimum.reduce(quotient, axis=None) < 0:  # floor and truncation differ below zero only
            return np.where((quotient < 0) & (quotient * b != a), quotient + want.type(1), quotient)
    elif quotient < 0 and quotient * b != a:
        return quotient + want.type(1)
    return quotient


def mod(a: Any, b: Any) -> Any:
    """a % b with the sign of a (C); Python's for two constexpr numbers."""
    if both_python(a, b):
        return a % b
    want = common_dtype(a, b, True)
    return np.fmod(*align(convert(a, want), convert(b, want)))


def truediv(a: Any, b: Any) -> Any:
    """a / b: at least float32; integers are cast to float32 first."""
    if both_python(a, b):
        return a / b
    a, b = dtypes.wide(a), dtypes.wide(b)
    want = common_dtype(a, b, True)
    if want.kind != "f":
        want = F32
    return np.divide(*align(convert(a, want), convert(b, want)))


def invert(a: Any) -> Any:
    """~a; on a Python bool the logical not, as Triton's int1."""
    return (not a) if isinstance(a, bool) else ~a


def negate(a: Any) -> Any:
    return typed(False) if a is False else -a


def cast(value: Any, dtype: Any, bitcast: bool = False) -> Any:
    """value.to(dtype): C casts, or the same bits where bitcast; Unsupported for dtypes that numpy lacks."""
    brain = dtypes.cast(value, dtype, bitcast)
    if brain is not None:
        return brain
    if isinstance(dtype, Opaque):
        raise Unsupported(f"values of {dtype}")
    if bitcast and getattr(value, "dtype", dtype) != dtype:
        if value.dtype is BOOL or dtype == BOOL:
            return value.astype(dtype)
        return np.ascontiguousarray(value).view(dtype).reshape(np.shape(value))[()]
    return convert(value, np.dtype(dtype))
