"""The processes of a campaign's jobs, which end with it."""

import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO

from ..checkout import ROOT

_PATIENCE = 10.0  # seconds in which an interrupted job closes its engines, before it is killed


class Processes:
    """Processes that threads started and wait for. Where the `with` ends, those that still run are interrupted, and no thread
    starts another one."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._over = False

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._over = True
            left = tuple(self._running)
        for process in left:
            process.send_signal(signal.SIGINT)
        for process in left:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_PATIENCE)
            process.kill()

    def run(self, command: Sequence[str], environment: Mapping[str, str], log: IO[bytes]) -> int:
        """Run this to its end, its output in the log. Returns its exit code, or that of an interrupted process where it was
        not started any more."""
        with self._lock:
            if self._over:
                return -signal.SIGINT
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
            self._running.add(process)
        try:
            return process.wait()
        finally:
            with self._lock:
                self._running.discard(process)
