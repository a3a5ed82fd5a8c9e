"""The tensors that raw addresses may point into.  Some kernels load addresses from a table of integers and cast them to
pointers; such a pointer becomes a checked one here.  The embedding program registers its live pools; kernels never do.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

from .dtypes import I64, Opaque, PointerType
from .lanes import align
from .memory import Memory, Pointer
from .state import STATE, UnregisteredAddress, Unsupported, where
from .values import ndarray


class LivePools:
    """Named tensors which raw addresses may reach.  Holds the tensors, so `forget` them when the owner frees them.

    Policy: with a registry installed, an active lane at an address inside no registered tensor raises
    UnregisteredAddress; an access is checked against the tensor that contains the pointer's start.  Without a
    registry raw addresses are unchecked.
    """

    def __init__(self) -> None:
        self._pools: dict[str, tuple[int, int, torch.Tensor]] = {}

    def register(self, name: str, tensor: torch.Tensor) -> None:
        """Make a contiguous CPU tensor reachable by raw address; ValueError for any other.  Replaces a known name."""
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError(f"pool {name!r}: a contiguous CPU tensor is needed")
        start = tensor.data_ptr()
        self._pools[name] = (start, start + tensor.numel() * tensor.element_size(), tensor)

    def forget(self, name: str) -> None:
        """Make a pool unreachable; KeyError if it is not registered."""
        del self._pools[name]

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor for name, (_, _, tensor) in self._pools.items()}

    def find(self, address: int) -> tuple[str, int, torch.Tensor] | None:
        """(name, start address, tensor) of the pool that contains an address."""
        for name, (start, end, tensor) in self._pools.items():
            if start <= address < end:
                return name, start, tensor
        return None


class RawPointer:
    """A pointer made from an integer: byte address and element offsets, resolved to a checked pointer at access."""

    __slots__ = ("address", "element", "offsets")

    def __init__(self, address: int, element: Any, offsets: Any = 0) -> None:
        self.address, self.element, self.offsets = address, element, offsets

    def __add__(self, other: Any) -> RawPointer:
        wide = other.astype(I64) if isinstance(other, (ndarray, np.generic)) else other
        offsets, wide = align(self.offsets, wide)
        return RawPointer(self.address, self.element, offsets + wide)

    __radd__ = __add__

    def __getitem__(self, key: Any) -> RawPointer:
        return RawPointer(self.address, self.element, np.asarray(self.offsets, I64)[key])

    @property
    def dtype(self) -> PointerType:
        return PointerType(self.element)

    @property
    def shape(self) -> Any:
        return np.shape(self.offsets)

    def with_offsets(self, offsets: Any) -> RawPointer:
        return RawPointer(self.address, self.element, offsets)

    def cast(self, element: Any) -> RawPointer:
        moved = self.offsets * self.element.itemsize
        if np.any(moved % element.itemsize):
            raise Unsupported("cast of a raw pointer that is not aligned to its new element")
        return RawPointer(self.address, element, moved // element.itemsize)

    def resolve(self, mask: Any) -> Pointer:
        """The checked pointer.  UnregisteredAddress if a lane is active and no pool contains the address."""
        block = isinstance(self.offsets, ndarray)
        offsets = self.offsets if block else None
        base = 0 if block else int(self.offsets)
        if mask is not None and not np.any(mask):
            return Pointer(Memory("raw", np.empty(0, np.uint8), np.dtype(np.uint8), 0).view(self.element), base, offsets)
        pools: LivePools | None = STATE.pools
        if pools is None:
            return self._unchecked_window(mask, offsets, base)
        found = pools.find(self.address)
        if found is None:
            raise UnregisteredAddress(f"address {self.address:#x} lies in no live pool", **where())
        name, start, tensor = found
        data = tensor.detach().view(-1).view(torch.uint8).numpy()
        memory = Memory(f"pool {name}", data, np.dtype(np.uint8), start, tensor)
        if (self.address - start) % self.element.itemsize:
            raise Unsupported("raw address that is not aligned to its element within its pool")
        return Pointer(memory.view(self.element), base + (self.address - start) // self.element.itemsize, offsets)

    def _unchecked_window(self, mask: Any, offsets: Any, base: int) -> Pointer:
        """No registry: a window over exactly the active lanes, so that nothing is refused."""
        held = np.dtype(f"u{self.element.itemsize}") if isinstance(self.element, Opaque) else self.element
        low = high = base
        if offsets is not None:
            offsets, mask = align(offsets, mask)
            lanes = offsets if mask is None else offsets[np.broadcast_to(mask, offsets.shape)]
            low, high = int(lanes.min()), int(lanes.max())
        count = (high - low + 1) * held.itemsize
        window = (ctypes.c_char * count).from_address(self.address + low * held.itemsize)
        memory = Memory("raw", np.frombuffer(memoryview(window), held), self.element, self.address + low * held.itemsize)
        return Pointer(memory, base - low if offsets is None else -low, offsets)


def from_address(value: Any, element: Any) -> RawPointer:
    """An integer scalar cast to a pointer.  Unsupported for blocks of addresses."""
    if isinstance(value, ndarray) and value.ndim:
        raise Unsupported("a block of raw addresses")
    return RawPointer(int(value), element)
