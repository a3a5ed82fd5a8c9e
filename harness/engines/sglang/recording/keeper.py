"""Writes recordings, in a thread of its own: the scheduler waits for no disk, and a disk that is full stops no server."""

import queue
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from torch import Tensor

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.recording import SERVER, RecordedServer, RecordingHeader
from eagletwin.harness.core.trace import write_trace

_WAITING = 16  # recordings that wait to be written, at most: each is some megabytes in memory


class Keeper:
    """Writes each recording into a folder of its own below `folder`, and server.json after it.

    spent(seconds): told of the processor time that writing took; state(): what server.json says now
    """

    def __init__(
        self, folder: Path, megabytes: int, spent: Callable[[float], None], state: Callable[[], RecordedServer]
    ) -> None:
        self._folder = folder
        self._left = megabytes * 1_000_000
        self._spent, self._state = spent, state
        self._waiting: queue.Queue[tuple[RecordingHeader, Mapping[str, Tensor | Array]] | None] = queue.Queue(_WAITING)
        self.written = 0
        self.full = False  # for good: what is there is whole, and nothing is added to it

    def start(self) -> None:
        """Raises OSError if the folder cannot be written."""
        self._folder.mkdir(parents=True)
        self._say()
        threading.Thread(target=self._work, name="eagletwin-keeper", daemon=True).start()

    def keep(self, header: RecordingHeader, tensors: Mapping[str, Tensor | Array]) -> bool:
        """Have it written. False if too many wait."""
        try:
            self._waiting.put_nowait((header, tensors))
        except queue.Full:
            return False
        return True

    @property
    def busy(self) -> bool:
        return self._waiting.full()

    def note(self) -> None:
        """Have server.json written anew, if nothing else has it written soon."""
        if self._waiting.empty():
            try:
                self._waiting.put_nowait(None)
            except queue.Full:
                return

    def _work(self) -> None:
        while True:
            work, begin = self._waiting.get(), time.thread_time()
            try:
                if work is not None and not self.full:
                    self._write(*work)
                self._say()
            except OSError as error:
                self._give_up(error)
            self._spent(time.thread_time() - begin)

    def _write(self, header: RecordingHeader, tensors: Mapping[str, Tensor | Array]) -> None:
        folder = self._folder / header.request.id
        folder.mkdir()
        try:
            write_trace(folder, header, tensors)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self.written += 1
        self._left -= sum(file.stat().st_size for file in folder.iterdir())
        if self._left <= 0:
            self.full = True
            _tell("the files of the recordings are as large as was asked for: no further request is recorded")

    def _say(self) -> None:
        scratch = self._folder / f".{SERVER}"
        scratch.write_bytes(msgspec.json.encode(self._state()))
        scratch.replace(self._folder / SERVER)

    def _give_up(self, error: OSError) -> None:
        if not self.full:
            self.full = True
            _tell(
                f"error: {error}\n  so:  no further request is recorded; recordings that were complete are kept\n"
                "  try: name a folder on a disk with room, and start the server again"
            )


def _tell(text: str) -> None:
    print(f"eagletwin: {text}", file=sys.stderr, flush=True)
