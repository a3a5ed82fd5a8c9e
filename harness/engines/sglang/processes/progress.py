"""How far a case got, for the process that watches it: a few bytes at the head of a file in its folder, new at each stage.

A message would do, and wake the watcher some thirty times a case; this is read when a limit has passed, or a process has ended.
"""

import contextlib
import os
import struct
import time
from pathlib import Path

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
