"""The little that a running kernel can ask about its launch: which program it is, and how undefined lanes are filled.
One launch runs at a time in one thread; launch.py writes this, language.py and memory.py read it.
"""

from __future__ import annotations

import enum
import sys
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import numpy as np

MARK = "__eagletwin_triton_cpu__"  # present in the globals of every compiled kernel: tells its frames from the runtime's


class Fill(enum.Enum):
    """What undefined lanes hold during a run."""

    ZERO = "zero"  # as the stock interpreter: for comparing with it
    POISON = "poison"  # one conspicuous constant per dtype (NaN with a payload for floats)
    NOISE = "noise"  # large random values of both signs: the second half of a differential run


@dataclass(slots=True)
class Store:
    """Who last wrote a watched address."""

    file: str
    line: int
    program: tuple[int, int, int]


@dataclass(slots=True)
class State:
    kernel: str = ""
    program: tuple[int, int, int] = (0, 0, 0)
    ids: tuple[Any, Any, Any] = (np.int32(0), np.int32(0), np.int32(0))
    grid: tuple[int, int, int] = (1, 1, 1)
    stores: int = 0  # store instructions executed so far in this launch; 0 means that falling back is still safe
    fill: Fill = Fill.POISON
    noise: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    watch: int | None = None  # absolute byte address whose last writer is wanted
    writer: Store | None = None
    lanes: int = 1  # programs that run at once (lanes.py)
    undo: list[tuple[Any, Any, Any]] | None = None  # (array, indices, old values) of stores, while they may be taken back
    pools: Any = None  # LivePools | None
    brains: bool = False  # whether this launch had values of bfloat16


STATE = State()


def kernel_line() -> tuple[str, int]:
    """File and line of the innermost kernel frame on the stack; ("", 0) outside of kernels."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if MARK in frame.f_globals:
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return "", 0


def where() -> dict[str, Any]:
    """Keyword arguments that place a `KernelViolation`: kernel, file, line, program."""
    file, line = kernel_line()
    return {"kernel": STATE.kernel, "file": file, "line": line, "program": STATE.program}


# What this runtime says when a kernel does wrong: one exception per class of fault, each carrying kernel, line,
# program, argument and detail as fields and as one sentence.  Nothing here decides what is a fault; memory.py and
# checks.py raise these.


class Unsupported(Exception):
    """A construct which this runtime does not execute; the launch falls back to the stock interpreter if nothing is
    stored."""


class Unshadowed(Exception):
    """This runtime has run a launch, and the stock interpreter cannot: there is nothing to compare it with."""


class KernelError(RuntimeError):
    """A kernel failed after its first store, where falling back would run its side effects twice."""


class KernelViolation(Exception):
    """Base of every fault found in a kernel.  Fields are empty strings / None where they are not known."""

    def __init__(
        self,
        detail: str,
        *,
        kernel: str = "",
        file: str = "",
        line: int = 0,
        program: tuple[int, int, int] | None = None,
        argument: str = "",
    ) -> None:
        self.detail, self.kernel, self.file, self.line = detail, kernel, file, line
        self.program, self.argument = program, argument
        where = f" at {file}:{line}" if file else ""
        who = f" in program {program}" if program is not None else ""
        what = f" argument {argument!r}:" if argument else ""
        super().__init__(f"{type(self).__name__}: kernel {kernel!r}{where}{who}:{what} {detail}")


class OutOfBounds(KernelViolation):
    """An active lane read or wrote an element which the tensor given to the kernel does not have."""


class UnregisteredAddress(OutOfBounds):
    """An active lane used a raw address which no live pool contains, although pools were registered."""


class PoisonLeak(KernelViolation):
    """A stored result depends on an undefined value: a masked-off lane without `other`, or `torch.empty` memory."""


class OrderDependence(KernelViolation):
    """Two orders of the programs of one grid store different results: a race."""


class ShadowMismatch(KernelViolation):
    """This runtime and the stock interpreter disagree about a launch: a fault of one of the two, not of the kernel."""
