"""tl.atomic_*: read-modify-write of the active lanes, one after the other, returning what each lane found.
Programs run one at a time, so atomicity itself is free; the order of programs is launch.py's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .dtypes import BOOL
from .fill import undefined
from .memory import load, store
from .values import convert, ndarray


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
        old = undefined(element, offsets.shape)
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
