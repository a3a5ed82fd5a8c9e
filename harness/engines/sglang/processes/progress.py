"""What a process shows of its case to the one that watches it: how far it got, and its last message when it is stuck."""

import contextlib
import os
import signal
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

# How far a case got, for the process that watches it: a few bytes at the head of a file in its folder, new at each stage.
#
# A message would do, and wake the watcher some thirty times a case; this is read when a limit has passed, or a process has
# ended.

_NAME = ".progress"
_HEAD = struct.Struct("=dH")  # when, on the clock that all processes of a machine share; bytes of text after it
_SIZE = 256


class Progress:
    """Open it in both processes, that which writes and that which reads; the latter takes the file away at the end."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / _NAME
        self._descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o644)

    def reached(self, where: str) -> None:
        """In one piece, so that a process that dies leaves this or what was there before."""
        text = where.encode()[: _SIZE - _HEAD.size]
        os.pwrite(self._descriptor, _HEAD.pack(time.monotonic(), len(text)) + text, 0)

    def read(self) -> tuple[float, str] | None:
        """When something was reached last, and what; None: nothing yet."""
        data = os.pread(self._descriptor, _SIZE, 0)
        if len(data) < _HEAD.size:
            return None
        when, length = _HEAD.unpack_from(data)
        return when, data[_HEAD.size : _HEAD.size + length].decode(errors="replace")

    def close(self) -> None:
        os.close(self._descriptor)

    def remove(self) -> None:
        self.close()
        with contextlib.suppress(OSError):
            self._file.unlink()


# The last message of a stuck process: the trace of its case so far. Called by runner.py, asked for by supervise.py.
#
# A worker that waits for another rank or for a GPU does so in C++, where no handler of Python's runs. But a thread does: the
# signal's number comes through a pipe, the thread has the trace written, and ends the process.

ASK = signal.SIGUSR1
STUCK = 71  # exit status of a process that was asked, and wrote its trace


class LastWord:
    """Make one in the main thread, once in a process. `write` writes the trace of the case that runs; None between cases."""

    def __init__(self) -> None:
        self.write: Callable[[], None] | None = None
        self._asked, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.signal(ASK, lambda *_: None)  # a signal that Python does not know is not written to the pipe
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while os.read(self._asked, 1) != bytes([ASK]):
            pass
        if self.write is not None:
            with torch.inference_mode():
                self.write()
            os._exit(STUCK)
