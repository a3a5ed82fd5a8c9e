"""The bytes that a launch may change: saved, put back, and compared between two runs of the same launch. Covers the
whole storage of every tensor argument and every registered pool, so that raw-address writes are compared as well.
Used by checks.py only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .dtypes import F16, F32, F64

Image = dict[int, Any]  # storage address -> its bytes (uint8 array, copied)


@dataclass(frozen=True, slots=True)
class UnequalElement:
    """The first element in which two images differ; index is a tuple of the tensor's own indices where it is
    contiguous."""

    argument: str
    index: tuple[int, ...]
    first: Any
    second: Any
    count: int
    address: int


@dataclass(frozen=True, slots=True)
class Tolerance:
    """|a - b| <= absolute + relative * |b|, for one float dtype."""

    absolute: float
    relative: float


# Between this runtime and the stock interpreter.  Both do the same numpy operations in the same order, except that
# the stock interpreter keeps a float argument as a Python double where a GPU (and this runtime) has an fp32 scalar:
# one rounding, 2**-24 relative, of a factor like the softmax scale.  exp amplifies it by its argument (below 100 for
# values that matter): 6e-6.
SHADOW_TOLERANCE: Mapping[Any, Tolerance] = {
    F16: Tolerance(2e-3, 2e-3),  # the same rounding in fp16 is 2**-11
    F32: Tolerance(1e-5, 1e-5),
    F64: Tolerance(1e-5, 1e-5),  # a float64 result may stem from float32 values
}


def _bytes(tensor: torch.Tensor) -> Any:
    """The whole storage of a CPU tensor as a writable uint8 array that shares memory."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,)).numpy()


def element_dtype(tensor: torch.Tensor) -> Any:
    """numpy dtype to compare a tensor in; unsigned integers for the dtypes that numpy lacks."""
    try:
        return torch.empty(0, dtype=tensor.dtype).numpy().dtype
    except TypeError:
        return np.dtype(f"u{tensor.element_size()}")


def window(tensor: torch.Tensor) -> tuple[int, int, int]:
    """(storage address, first byte, byte after the last) of a tensor's extent within its storage."""
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    if not tensor.numel():
        return tensor.untyped_storage().data_ptr(), start, start
    last = sum((int(n) - 1) * int(step) for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.untyped_storage().data_ptr(), start, start + (last + 1) * size


class Snapshot:
    """The state before a launch, and views of the live bytes."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.tensors = [(name, tensor) for name, tensor in tensors if tensor.device.type == "cpu"]
        self._live: Image = {}
        for _, tensor in self.tensors:
            address = tensor.untyped_storage().data_ptr()
            if address not in self._live:
                self._live[address] = _bytes(tensor)
        self.before = self.image()

    def image(self) -> Image:
        """A copy of the live bytes as they are now."""
        return {address: live.copy() for address, live in self._live.items()}

    def put(self, image: Image) -> None:
        """Write an image back into the live storages."""
        for address, live in self._live.items():
            live[:] = image[address]

    def first_difference(
        self,
        first: Image,
        second: Image,
        tolerance: Mapping[Any, Tolerance] | None = None,
        ignored: Image | None = None,
    ) -> UnequalElement | None:
        """The first argument element in which the images differ: bit by bit, or within a tolerance for the dtypes it
        names.

        ignored: per storage, bool per byte that is not to be compared.
        """
        changed = {address for address in self._live if not np.array_equal(first[address], second[address])}
        covered = {address: np.zeros(self._live[address].size, bool) for address in changed}
        for name, tensor in self.tensors:
            address, start, end = window(tensor)
            if address not in changed or start == end:
                continue
            covered[address][start:end] = True
            dtype = element_dtype(tensor)
            a, b = (image[address][start:end].view(dtype) for image in (first, second))
            bad = differing(a, b, None if tolerance is None else tolerance.get(dtype))
            if ignored is not None:
                bad &= ~ignored[address][start:end].reshape(a.size, dtype.itemsize).all(axis=1)
            found = bad.nonzero()[0]
            if found.size:
                at = int(found[0])
                index = tuple(int(i) for i in np.unravel_index(at, tensor.shape)) if tensor.is_contiguous() else (at,)
                place = address + start + at * dtype.itemsize
                return UnequalElement(name, index, a[at].item(), b[at].item(), int(found.size), place)
        for address in changed:
            bad = (first[address] != second[address]) & ~covered[address]
            if ignored is not None:
                bad &= ~ignored[address]
            found = bad.nonzero()[0]
            if found.size:
                at = int(found[0])
                a, b = int(first[address][at]), int(second[address][at])
                return UnequalElement("(storage outside every argument)", (at,), a, b, int(found.size), address + at)
        return None


def differing(a: Any, b: Any, tolerance: Tolerance | None) -> Any:
    """Elementwise: not the same bits, or for floats with a tolerance, apart by more than it; NaN equals NaN."""
    if tolerance is None:
        unsigned = np.dtype(f"u{a.itemsize}")
        return a.view(unsigned) != b.view(unsigned)
    with np.errstate(all="ignore"):
        near = np.abs(a - b) <= tolerance.absolute + tolerance.relative * np.abs(b)
    return ~(near | (a == b) | (np.isnan(a) & np.isnan(b)))
