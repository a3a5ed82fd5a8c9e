"""Watches the process in which cases run, for whoever started it: engine.py on a CPU, cuda_host.py on a GPU."""

import ctypes
import os
import select
import signal
import socket
import time
from dataclasses import dataclass

from eagletwin.harness.engines import wire
from eagletwin.harness.trace import Ending

HARNESS_FAILED = 70  # exit status of a runner that failed outside the worker
_PR_SET_PDEATHSIG = 1


def reap() -> None:
    """Collect children that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass(slots=True)
class Runner:
    """A process that runs cases; `ran` counts those that it finished since it was fresh."""

    pid: int
    connection: socket.socket
    ran: int = 0

    def gone(self) -> bool:
        """Whether it was killed while it waited: it says nothing then, so anything to read is its end."""
        return bool(select.select([self.connection], [], [], 0)[0])


def supervise(standing: Runner, caller: socket.socket, run: wire.Run) -> wire.Ran | wire.Failed:
    """Hand the runner a case; watch its progress; say how it ended."""
    begun = stepped = time.monotonic()
    where, overdue = "start", ""
    wire.send(standing.connection, run)
    while True:
        now = time.monotonic()
        left = min(stepped + run.step_seconds, begun + run.case_seconds) - now
        if left <= 0:
            limit = "case" if now - begun >= run.case_seconds else "step"
            seconds = run.case_seconds if limit == "case" else run.step_seconds
            overdue = f"no end of the {limit} within {seconds:g} s"
            os.kill(standing.pid, signal.SIGUSR2)  # write all stacks to engine.log, where Python still can
            select.select([standing.connection], [], [], 1.0)
            os.kill(standing.pid, signal.SIGKILL)
            break
        if not select.select([standing.connection], [], [], left)[0]:
            continue
        try:
            message, _ = wire.receive(standing.connection)
        except (EOFError, ConnectionError):
            break
        if isinstance(message, wire.Ran):
            return message
        if isinstance(message, wire.Reached):
            where, stepped = message.where, time.monotonic()
            continue
        assert isinstance(message, wire.Stepped)
        waited = time.monotonic()
        try:
            wire.send(caller, message)
            step, _ = wire.receive(caller)
        except (EOFError, OSError):
            os._exit(0)
        wire.send(standing.connection, step)
        stepped = time.monotonic()
        begun += stepped - waited  # the caller's own time does not count
    standing.connection.close()
    _, status = os.waitpid(standing.pid, 0)
    if overdue:
        return wire.Ran(Ending(kind="hung", detail=overdue, where=where), False, standing.ran)
    if os.WIFSIGNALED(status):
        detail = f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    elif os.WEXITSTATUS(status) == HARNESS_FAILED:
        return wire.Failed(f"last seen: {where}")
    elif code := os.WEXITSTATUS(status):
        detail = f"exited with status {code}"
    else:  # something called exit() in the middle
        detail = "exited without a trace"
    return wire.Ran(Ending(kind="crashed", detail=detail, where=where), False, standing.ran)
