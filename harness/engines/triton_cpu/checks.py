"""The checks that run a launch more than once from the same memory and compare what it stored: undefined values
(poison), program order (races), and the stock interpreter (shadow).  Bounds are memory.py's and always on.
install.py calls `execute`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from triton.runtime.errors import InterpreterError

from .errors import KernelError as _KernelError
from .errors import KernelViolation, OrderDependence, PoisonLeak, ShadowMismatch, Unshadowed, Unsupported
from .fill import noise, poison_bits, recognisable
from .launch import Launch, run
from .pools import LivePools
from .snapshot import SHADOW_TOLERANCE, Image, Snapshot, UnequalElement, element_dtype, window
from .state import STATE, Fill


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
    launch: Launch,
    memory: Snapshot,
    after: Image,
    seed: int | None,
    number: int,
    report: Callable[[KernelViolation], None],
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
    launch: Launch,
    memory: Snapshot,
    stock: Callable[[], object],
    seed: int | None,
    report: Callable[[KernelViolation], None],
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
