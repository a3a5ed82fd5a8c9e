"""tl's functions that rearrange elements without computing: reshape, broadcast, transpose, join and the like, for
values and pointers alike.  Called by language.py, which puts these under their tl names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .bfloat16 import Brain
from .dtypes import I64
from .lanes import extra
from .memory import Pointer
from .pools import RawPointer
from .state import STATE

POINTERS = (Pointer, RawPointer)


def dims(shape: Any) -> tuple[int, ...]:
    return tuple(int(n) for n in (shape if isinstance(shape, (tuple, list)) else (shape,)))


def _shaped(x: Any, change: Callable[[Any], Any]) -> Any:
    if x.__class__ is Brain:
        return Brain(change(np.asarray(x.values)))
    return x.reshaped(change(np.asarray(x.offsets))) if isinstance(x, POINTERS) else change(np.asarray(x))


def _spread(shape: tuple[Any, ...]) -> tuple[int, ...]:
    return dims(shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape)


def _laned(v: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """shape with the value's own lane axis; a number is the same in all lanes."""
    return ((v.shape[:1] or (1,)) + shape) if STATE.lanes > 1 else shape


def _widened(v: Any, shape: tuple[int, ...]) -> Any:
    if STATE.lanes > 1 and v.ndim:
        v = v.reshape(v.shape[:1] + (1,) * (len(shape) + 1 - v.ndim) + v.shape[1:])
    return np.broadcast_to(v, _laned(v, shape))


def reshape(x: Any, *shape: Any, can_reorder: Any = False) -> Any:
    return _shaped(x, lambda v: v.reshape(_laned(v, _spread(shape))))


def broadcast_to(x: Any, *shape: Any) -> Any:
    return _shaped(x, lambda v: _widened(v, _spread(shape)))


def broadcast(input: Any, other: Any) -> Any:
    shape = np.broadcast_shapes(*(np.shape(x)[len(extra()) :] for x in (input, other)))
    return broadcast_to(input, shape), broadcast_to(other, shape)


def expand_dims(x: Any, axis: Any) -> Any:
    return _shaped(x, lambda v: np.expand_dims(v, axis + 1 if STATE.lanes > 1 and axis >= 0 else axis))


def trans(x: Any, *dims: Any) -> Any:
    """Axes in the order dims; reversed without dims (x.T)."""
    return _shaped(x, lambda v: np.transpose(v, _order(v.ndim, dims)))


def _order(rank: int, dims: tuple[Any, ...]) -> tuple[int, ...]:
    rank -= len(extra())
    order = _spread(dims) if dims else tuple(reversed(range(rank)))
    return (0, *(axis % rank + 1 for axis in order)) if extra() and rank >= 0 else order


def ravel(x: Any, can_reorder: Any = False) -> Any:
    return _shaped(x, lambda v: v.ravel())


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
