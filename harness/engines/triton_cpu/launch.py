"""One launch of a compiled kernel: tensors to memories, numbers to Triton's scalars, then every program of the grid
in order. Knows nothing of checks; checks.py calls `run` once or more often per launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import torch

from .compiler import Compiled, Device, adapt
from .dtypes import BF16, F32, U32, Opaque
from .lanes import Diverged, Groupings
from .memory import Memory, Pointer
from .state import MARK, STATE, Fill, KernelError, KernelViolation, Unsupported
from .values import scalar_dtype

_OPAQUE = {torch.bfloat16: (BF16, torch.int16)}
for _kind, _name in (
    ("e4nv", "float8_e4m3fn"),
    ("e5", "float8_e5m2"),
    ("e4b8", "float8_e4m3fnuz"),
    ("e5b16", "float8_e5m2fnuz"),
):
    _OPAQUE[getattr(torch, _name)] = (Opaque(f"float8{_kind}", 1), torch.uint8)


_LITERALS = frozenset((int, float, bool, str))  # a constexpr of these is seen as it is

_MANY = 16  # programs of numbers alone that run faster at once than one by one (27 of them: 0.9 ms instead of 1.3)

_GROUPINGS = Groupings()


@dataclass(frozen=True, slots=True)
class Launch:
    """Arguments by name as the caller gave them (defaults included), and the resolved grid."""

    kernel: Compiled
    arguments: dict[str, Any]
    grid: tuple[int, int, int]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in self.arguments.items():
            if isinstance(value, torch.Tensor):
                yield name, value
            elif isinstance(value, tuple):
                yield from ((f"{name}[{i}]", v) for i, v in enumerate(value) if isinstance(v, torch.Tensor))


def bind(kernel: Compiled, args: tuple[Any, ...], kwargs: dict[str, Any], grid: Any) -> Launch:
    """Match arguments to parameters (launch options such as num_warps are dropped).  TypeError if one is missing."""
    arguments = {**kernel.defaults, **dict(zip(kernel.parameters, args, strict=False))}
    for name, value in kwargs.items():
        if name in kernel.parameters:
            arguments[name] = value
    if len(arguments) < len(kernel.parameters) or len(args) > len(kernel.parameters):
        missing = [name for name in kernel.parameters if name not in arguments]
        raise TypeError(f"kernel {kernel.name!r}: missing arguments {missing}" if missing else "too many arguments")
    sizes = grid(arguments) if callable(grid) else grid
    x, y, z = (*(int(n) for n in sizes), 1, 1, 1)[:3]
    return Launch(kernel, arguments, (x, y, z))


def _reach(tensor: torch.Tensor, extent: int) -> Any:
    """Which of the extent's elements belong to a view with gaps; None where all do."""
    if tensor.numel() >= extent:  # no gap (overlapping views, stride 0, have no more elements than they repeat)
        dense = tensor.is_contiguous() or all(stride for stride in tensor.stride())
        if dense:
            return None
    return _marks(tuple(tensor.shape), tensor.stride(), extent)


@lru_cache(16)  # the same pools are in every launch, and the latent rows of one have millions of elements
def _marks(shape: tuple[int, ...], strides: tuple[int, ...], extent: int) -> Any:
    marks = torch.zeros(extent, dtype=torch.bool)
    torch.as_strided(marks, shape, strides, 0).fill_(True)
    return marks.numpy()


def memory(name: str, tensor: torch.Tensor) -> Memory:
    """A tensor's own extent, from its first to its last reachable element.  Unsupported off the CPU."""
    if not tensor.is_cpu:
        raise Unsupported(f"argument {name} is on {tensor.device}")
    if tensor.requires_grad:
        tensor = tensor.detach()
    flat = tensor
    dtype: Any = None
    if tensor.dtype in _OPAQUE:
        dtype, held = _OPAQUE[tensor.dtype]
        flat = tensor.view(held)
    if flat.is_contiguous():
        array = flat.numpy() if flat.ndim == 1 else flat.numpy().reshape(-1)
        return Memory(name, array, dtype or array.dtype, tensor.data_ptr(), tensor)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(flat.shape, flat.stride(), strict=True)) if flat.numel() else 0
    array = torch.as_strided(flat, (extent,), (1,)).numpy()
    return Memory(name, array, dtype or array.dtype, tensor.data_ptr(), tensor, _reach(flat, extent) if extent else None)


def _value(name: str, value: Any, constexpr: bool) -> Any:
    if value is None or (constexpr and value.__class__ in _LITERALS):
        return value
    if value.__class__ is int and -(2**31) <= value < 2**31 and not constexpr:
        return np.int32(value)
    if isinstance(value, torch.Tensor):
        return Pointer(memory(name, value), 0)
    if constexpr:
        return adapt(value)
    if isinstance(value, bool):
        return np.bool_(value)
    if isinstance(value, int):
        dtype = scalar_dtype(value)
        return np.int64(value) if dtype is U32 else dtype.type(value)
    if isinstance(value, float):
        return F32.type(value)  # a float argument is an fp32 scalar on a GPU (the stock interpreter keeps a Python float)
    if isinstance(value, tuple):
        return tuple(_value(f"{name}[{i}]", v, constexpr) for i, v in enumerate(value))
    if hasattr(value, "data_ptr") or type(value).__name__ == "TensorDescriptor":
        raise Unsupported(f"argument {name} is a {type(value).__name__}")
    adapted = adapt(value)
    return adapted if isinstance(adapted, Device) else _value(name, adapted, constexpr) if adapted is not value else value


def programs(grid: tuple[int, int, int], seed: int | None, reverse: bool) -> list[tuple[int, int, int]]:
    """Every program id: in the stock interpreter's order for seed None, else shuffled by the seed; backwards where
    reverse."""
    x, y, z = grid
    order = list(product(range(x), range(y), range(z)))
    if seed is not None:
        order = [order[i] for i in np.random.default_rng(seed).permutation(len(order))]
    return order[::-1] if reverse else order


def run(
    launch: Launch,
    fill: Fill = Fill.POISON,
    seed: int | None = None,
    reverse: bool = False,
    watch: int | None = None,
    together: bool = True,
) -> None:
    """Execute every program; consecutive ones at once where that is possible and `together` (else in exactly this
    order).

    Raises KernelViolation as found, Unsupported if nothing was stored yet, else KernelError."""
    kernel = launch.kernel
    STATE.kernel, STATE.grid, STATE.stores = kernel.name, launch.grid, 0
    STATE.fill, STATE.watch, STATE.writer = fill, watch, None
    STATE.lanes, STATE.undo, STATE.brains = 1, None, False
    try:
        positional = [_value(name, launch.arguments[name], constexpr) for name, constexpr in kernel.parameters.items()]
        order = programs(launch.grid, seed, reverse)
        with np.errstate(all="ignore"):
            if (
                together
                and seed is None
                and not reverse
                and watch is None
                and len(order) > 1
                and (kernel.heavy or len(order) > _MANY)
                and kernel.runs_in_lanes()
            ):
                _in_groups(kernel, positional, order)
            else:
                _one_by_one(kernel, positional, order)
    except KernelViolation:
        raise
    except Exception as error:
        spot = _innermost(error)
        if STATE.stores:
            raise KernelError(f"kernel {kernel.name!r} in program {STATE.program}{spot}: {error!r}, after it stored") from error
        raise Unsupported(f"{error!r}{spot}") from error


def _one_by_one(kernel: Compiled, positional: list[Any], order: list[tuple[int, int, int]]) -> None:
    for program in order:
        x, y, z = STATE.program = program
        STATE.ids = (np.int32(x), np.int32(y), np.int32(z))
        kernel.function(*positional)


def _in_groups(kernel: Compiled, positional: list[Any], order: list[tuple[int, int, int]]) -> None:
    """Groups of consecutive programs at once; one that diverges is split where it does, one that fails runs one by one."""
    grouping = _GROUPINGS.of((kernel.function, STATE.grid), len(order))
    start = position = 0
    while start < len(order):
        size = grouping.sizes[position]
        group = order[start : start + size]
        done = size == 1
        if done:
            _one_by_one(kernel, positional, group)
        else:
            stores = STATE.stores
            failure = _at_once(kernel, positional, group)
            if failure is not None:
                STATE.stores = stores
                if isinstance(failure, Diverged):
                    first = failure.agreeing or size // 2
                    grouping.sizes[position : position + 1] = [first, size - first]
                    continue
                _one_by_one(kernel, positional, group)  # raises what the group raised, for the program that it belongs to
        start, position = start + size, position + 1


def _at_once(kernel: Compiled, positional: list[Any], group: list[tuple[int, int, int]]) -> Exception | None:
    """Run a group in lanes; what it raised, with its stores taken back, or None."""
    STATE.program = group[0]
    axes = [np.array(axis, np.int32) for axis in zip(*group, strict=True)]
    x, y, z = (axis if (axis != axis[0]).any() else axis[0] for axis in axes)
    STATE.ids, STATE.lanes, STATE.undo = (x, y, z), len(group), []
    try:
        kernel.function(*positional)
    except Exception as error:
        for array, where, old in reversed(STATE.undo):
            array[where] = old
        return error
    finally:
        STATE.lanes, STATE.undo = 1, None
    return None


def _innermost(error: Exception) -> str:
    """' at file:line' of the kernel frame that raised."""
    spot, trace = "", error.__traceback__
    while trace is not None:
        if MARK in trace.tb_frame.f_globals:
            spot = f" at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return spot
