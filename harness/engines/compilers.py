"""Time in which a compiler runs does not count against a limit: SGLang compiles kernels when they are first used.

nvcc takes from seconds to minutes for one. A worker that was ended meanwhile would take the compiler with it, and so would the
next. One process compiles and others wait for its lock, so a compiler counts for all engines of the session (as `setsid` means
it) that it runs in.
"""

import os
import select
import socket
import time
from pathlib import Path

# As the kernel names a process, which is up to 15 letters of its program: CUDA's compilers, those for C++, and who calls them.
_COMPILERS = frozenset(
    (
        *("nvcc", "cicc", "cudafe++", "ptxas", "ptxas-blackwell", "fatbinary", "nvlink", "ninja"),
        *("g++", "c++", "cc1plus", "clang++", "gcc", "cc1", "ld", "collect2"),
    )
)
# FlashInfer's largest module takes two minutes on two cores. More than this in one case is no compiler that will end.
MOST_SECONDS = 900.0
# How often a watcher looks. A compiler that ends in less is not seen, and need not be.
LOOK_SECONDS = 2.0


def compiler_runs() -> bool:
    """Whether a compiler runs in this process's session."""
    session = os.getsid(0)
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text(errors="replace")
        except OSError:  # it has ended
            continue
        begin, end = stat.index("("), stat.rindex(")")
        if stat[begin + 1 : end] in _COMPILERS and int(stat[end + 1 :].split()[3]) == session:
            return True
    return False


class CompileTime:
    """Counts the time in which a compiler runs, for a watcher that looks every LOOK_SECONDS."""

    def __init__(self) -> None:
        self._looked = time.monotonic()
        self._left = MOST_SECONDS

    def since_last_look(self) -> float:
        """Seconds that have gone by since the last look, if a compiler runs now; else 0, as before it is time for a look."""
        now = time.monotonic()
        gone = now - self._looked
        if gone < 0.9 * LOOK_SECONDS:  # who was woken by something else comes early
            return 0.0
        self._looked = now
        if self._left <= 0 or not compiler_runs():
            return 0.0
        gone = min(gone, self._left)
        self._left -= gone
        return gone


def answers_within(connection: socket.socket, seconds: float) -> bool:
    """Wait until something can be read from a connection, or it has ended; False if that takes longer."""
    compiled, end = CompileTime(), time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if select.select([connection], [], [], min(left, LOOK_SECONDS))[0]:
            return True
        end += compiled.since_last_look()
    return False
