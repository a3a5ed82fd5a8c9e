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
