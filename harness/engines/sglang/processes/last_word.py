"""The last message of a stuck process: the trace of its case so far. Called by runner.py, asked for by supervise.py.

A worker that waits for another rank or for a GPU does so in C++, where no handler of Python's runs. But a thread does: the
signal's number comes through a pipe, the thread has the trace written, and ends the process.
"""

import os
import signal
import threading
from collections.abc import Callable

import torch

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
