"""The checks that run a launch more than once from the same memory and compare what it stored: undefined values
(poison), program order (races), and the stock interpreter (shadow).  Bounds are memory.py's and always on.
install.py calls `execute`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from triton.runtime.errors import InterpreterError

from .dtypes import F16, F32, F64, noise, poison_bits, recognisable
from .launch import Launch, run
from .pools import LivePools
from .state import STATE, Fill, KernelViolation, OrderDependence, PoisonLeak, ShadowMismatch, Unshadowed, Unsupported
from .state import KernelError as _KernelError

# The bytes that a launch may change: saved, put back, and compared between two runs of the same launch. Covers the
# whole storage of every tensor argument and every registered pool, so that raw-address writes are compared as well.

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
        self, first: Image, second: Image, tolerance: Mapping[Any, Tolerance] | None = None, ignored: Image | None = None
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    """What is done with every launch.  Each of poison, races and shadow saves and compares all argument storages.

    order: seed of a random program order (a new one for each launch); None is the stock interpreter's order.
    poison: run again with other values in undefined lanes and in recognised `torch.empty` memory; any stored byte
    that changes raises PoisonLeak.  Exact: a value that is masked away or multiplied by nothing reaches no store.
    races: run again with the programs in reverse; any stored byte that changes raises OrderDependence.
    shadow: run in the stock interpreter too; ShadowMismatch unless integers agree exactly and floats to
    SHADOW_TOLERANCE.
    on_fault: "record" keeps these three in `faults()` and goes on with the first run's result; OutOfBounds is always
    raised.
    """

    order: int | None = None
    poison: bool = False
    races: bool = False
    shadow: bool = False
    on_fault: Literal["raise", "record"] = "raise"


def execute(
    launch: Launch,
    stock: Callable[[], object],
    checks: Checks,
    pools: LivePools | None,
    number: int,
    report: Callable[[KernelViolation], None],
) -> None:
    """Run the launch under the checks; memory ends as the first run left it. With values of bfloat16 there is
    no shadow to compare with.

    stock: runs the same launch in the stock interpreter.  number: how many launches came before (varies seeds).
    report: receives each fault of poison, races and shadow.  Raises Unsupported if nothing was stored, and Unshadowed if the
    launch has run and the stock interpreter cannot run it.
    """
    seed = None if checks.order is None else checks.order * 1_000_003 + number
    STATE.pools = pools
    if not (checks.poison or checks.races or checks.shadow):
        run(launch, seed=seed)
        return
    registered = [] if pools is None else [(f"pool {name}", tensor) for name, tensor in pools.tensors().items()]
    memory = Snapshot([*launch.tensors(), *registered])
    run(launch, seed=seed, together=not checks.races)
    after = memory.image()
    try:
        if checks.races:
            _races(launch, memory, after, seed, report)
        if checks.poison:
            _poison(launch, memory, after, seed, number, report)
        if checks.shadow:
            _shadow(launch, memory, stock, seed, report)
    finally:
        memory.put(after)


def _writer(launch: Launch, memory: Snapshot, start: Image, difference: UnequalElement, **options: Any) -> dict[str, Any]:
    """Who last stored to the differing address: one more run with that address watched."""
    memory.put(start)
    with suppress(KernelViolation, _KernelError, Unsupported):
        run(launch, watch=difference.address, **options)
    spot: dict[str, Any] = {"kernel": launch.kernel.name, "argument": difference.argument}
    if STATE.writer is not None:
        spot |= {"file": STATE.writer.file, "line": STATE.writer.line, "program": STATE.writer.program}
    return spot


def _more(difference: UnequalElement) -> str:
    return f" ({difference.count} elements differ)" if difference.count > 1 else ""


def _races(launch: Launch, memory: Snapshot, after: Image, seed: int | None, report: Callable[[KernelViolation], None]) -> None:
    memory.put(memory.before)
    try:
        run(launch, seed=seed, reverse=True)
    except KernelViolation as error:
        report(OrderDependence(f"only with its programs in reverse order: {error}", kernel=launch.kernel.name))
        return
    found = memory.first_difference(after, memory.image())
    if found is not None:
        spot = _writer(launch, memory, memory.before, found, seed=seed, reverse=True)
        text = f"element {found.index} is {found.first} in one order of the programs and {found.second} in the reverse"
        report(OrderDependence(text + _more(found), **spot))


def _garbage(memory: Snapshot) -> tuple[Image, Image]:
    """(memory.before with each recognised poison element replaced by noise, bool per byte where that was done)."""
    replaced = {address: data.copy() for address, data in memory.before.items()}
    marks = {address: np.zeros(data.size, bool) for address, data in memory.before.items()}
    for _, tensor in memory.tensors:
        address, start, end = window(tensor)
        dtype = element_dtype(tensor)
        if start == end or not recognisable(dtype) or tensor.dtype.is_complex:
            continue
        held = memory.before[address][start:end].view(f"u{dtype.itemsize}") == poison_bits(dtype)
        held &= ~marks[address][start:end].reshape(held.size, dtype.itemsize).any(axis=1)
        if held.any():
            values = noise(dtype, (int(held.sum()),))
            replaced[address][start:end].view(dtype)[held] = values
            marks[address][start:end].reshape(held.size, dtype.itemsize)[held] = True
    return replaced, marks


def _poison(
    launch: Launch, memory: Snapshot, after: Image, seed: int | None, number: int, report: Callable[[KernelViolation], None]
) -> None:
    STATE.noise = np.random.default_rng(number)
    start, marks = _garbage(memory)
    memory.put(start)
    options: dict[str, Any] = {"fill": Fill.NOISE, "seed": seed}
    try:
        run(launch, **options)
    except (KernelViolation, _KernelError, Unsupported) as error:
        report(PoisonLeak(f"an undefined value decides what the kernel does: {error}", **_place(launch, error)))
        return
    other = memory.image()
    # Poison that neither run wrote differs by construction.
    untouched = {
        address: mark & (after[address] == memory.before[address]) & (other[address] == start[address])
        for address, mark in marks.items()
    }
    found = memory.first_difference(after, other, ignored=untouched)
    if found is not None:
        spot = _writer(launch, memory, memory.before, found, seed=seed)
        text = f"element {found.index} depends on an undefined value: {found.first} with poison, {found.second} with noise"
        report(PoisonLeak(text + _more(found), **spot))


def _place(launch: Launch, error: Exception) -> dict[str, Any]:
    if not isinstance(error, KernelViolation):
        return {"kernel": launch.kernel.name}
    fields = ("kernel", "file", "line", "program", "argument")
    return {name: getattr(error, name) for name in fields}


def _shadow(
    launch: Launch, memory: Snapshot, stock: Callable[[], object], seed: int | None, report: Callable[[KernelViolation], None]
) -> None:
    memory.put(memory.before)
    run(launch, fill=Fill.ZERO, seed=seed)  # the stock interpreter has zero in undefined lanes
    if STATE.brains:
        raise _KernelError(f"kernel {launch.kernel.name!r} has bfloat16, which the stock interpreter does not compute with")
    ours = memory.image()
    memory.put(memory.before)
    try:
        with np.errstate(all="ignore"):  # as in this runtime: undefined lanes overflow and divide by zero
            stock()
    except InterpreterError as error:
        raise Unshadowed(str(error)) from error
    found = memory.first_difference(ours, memory.image(), SHADOW_TOLERANCE)
    if found is not None:
        spot = _writer(launch, memory, memory.before, found, fill=Fill.ZERO, seed=seed)
        text = f"element {found.index} is {found.first} here and {found.second} in the stock interpreter"
        report(ShadowMismatch(text + _more(found), **spot))
