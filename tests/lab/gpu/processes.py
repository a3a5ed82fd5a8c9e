"""The processes of a campaign, and how they share a GPU."""

import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from ..common import ROOT

# The processes of a campaign's jobs, which end with it.

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


# NVIDIA's MPS for the time of a run, so that engines use one GPU at the same time.
#
# Without it the processes on a GPU take turns of some milliseconds, and a tap that waits for the GPU waits for the turns of all
# others: with 15 engines a case takes five times as long. MPS hands the work of all of them to one context
# of the GPU. The price is that an error on the GPU, such as an illegal access, ends every process that shares it. So a job in
# which a worker died runs again with the GPU to itself, and a job that is to show something never shares it (jobs.py).
#
# The daemon is a program of the driver. It changes no setting of the GPU, and ends with the run.

CONTROL = "nvidia-cuda-mps-control"
_SECONDS = 30.0  # the daemon answers at once; a driver that hangs must not hold the run


class Sharing:
    """A daemon of MPS between `with` and its end. `environment`: what a process needs to share the GPU; empty without a daemon.

    why_not  why there is none, as the summary says it
    """

    def __init__(self, *, wanted: bool) -> None:
        self.environment: dict[str, str] = {}
        self.why_not = "" if wanted else "--no-mps"
        self._folder: Path | None = None

    def __enter__(self) -> "Sharing":
        control = shutil.which(CONTROL)
        if not self.why_not and control is None:
            self.why_not = f"{CONTROL} is not on the path"
        if self.why_not or control is None:
            return self
        self._folder = Path(tempfile.mkdtemp(prefix="eagletwin-mps-"))
        environment = {"CUDA_MPS_PIPE_DIRECTORY": str(self._folder), "CUDA_MPS_LOG_DIRECTORY": str(self._folder)}
        self.why_not = _ask(control, ["-d"], "", environment)
        if not self.why_not:
            self.environment = environment
        return self

    def __exit__(self, *_: object) -> None:
        control = shutil.which(CONTROL)
        if self.environment and control is not None:
            _ask(control, [], "quit\n", self.environment)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _ask(control: str, arguments: list[str], said: str, environment: dict[str, str]) -> str:
    """Run the control program. Returns why that failed, or nothing."""
    try:
        ran = subprocess.run(
            [control, *arguments],
            input=said,
            env=os.environ | environment,
            stdout=subprocess.DEVNULL,  # the daemon keeps what it is given: a pipe would stay open as long as it runs
            stderr=subprocess.DEVNULL,
            timeout=_SECONDS,
            text=True,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{CONTROL}: {error}"
    return f"{CONTROL} ended with {ran.returncode}" if ran.returncode else ""
