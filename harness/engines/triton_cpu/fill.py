"""What undefined values look like: poison constants, noise for differential runs, and zero for comparing with the
stock interpreter.  Also marks torch.empty memory with the poison constants.  Used by memory.py (masked-off lanes) and
checks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from .dtypes import BOOL, Opaque
from .state import STATE, Fill

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


def filled(shape: Any, value: Any, dtype: Any) -> Any:
    """np.full without its overhead."""
    result = np.empty(shape, dtype)
    result.fill(value)
    return result


def undefined(dtype: Any, shape: tuple[int, ...] | None) -> Any:
    """Fresh undefined value(s) of a dtype: scalar for shape None, else an array; what they hold is STATE.fill."""
    if isinstance(dtype, Opaque):
        dtype = np.dtype(f"u{dtype.itemsize}")
    if STATE.fill is Fill.ZERO:
        return dtype.type(0) if shape is None else np.zeros(shape, dtype)
    if STATE.fill is Fill.POISON:
        return _POISON[dtype] if shape is None else filled(shape, _POISON[dtype], dtype)
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
