"""One configuration of the real worker, forked from the zygote: it builds the scheduler and never runs a case itself.

Each case runs in a runner, a fork of this process. A runner runs up to CASES_PER_RUNNER cases, one after another, since a fork
costs about as much as a small case; it is replaced when a case asks for a fresh one, and after anything but a clean end.
"""

import ctypes
import gc
import os
import select
import signal
import socket
import time
import traceback
from dataclasses import dataclass
from typing import Any, NoReturn

from eagletwin.harness.engines import wire
from eagletwin.harness.trace import Ending, EngineInfo

from . import boot, identity, kernels, patches, runner, stubs

CASES_PER_RUNNER = 20
_PR_SET_PDEATHSIG = 1


def reap() -> None:
    """Collect children that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def serve(connection: socket.socket, build: wire.Build) -> NoReturn:
    """Answer the caller's Run messages until it hangs up."""
    die_with_parent()
    try:
        for patch in build.patches:
            patches.apply(patch)
    except patches.PatchFailed as error:
        wire.send(connection, wire.PatchDidNotApply(str(error)))
        os._exit(0)
    kernels.prepare(build.kernels)
    try:
        scheduler = boot.build_scheduler(build.configuration)
    except BaseException as error:
        wire.send(connection, wire.Refused(f"{type(error).__name__}: {error}", traceback.format_exc()))
        os._exit(0)
    changed = boot.changed(scheduler, build.configuration)
    if changed:
        wire.send(connection, wire.Refused(f"it changes {changed} without being asked", ""))
        os._exit(0)
    gc.freeze()
    info = _info(build, scheduler)
    wire.send(connection, wire.Built(info))
    standing: _Runner | None = None
    while True:
        try:
            message, _ = wire.receive(connection)
        except (EOFError, ConnectionError):
            os._exit(0)
        assert isinstance(message, wire.Run)
        if standing is not None and (standing.spent(message.fresh) or standing.gone()):
            standing.connection.close()  # it ends by itself
            standing = None
        reap()
        if standing is None:
            standing = _start(connection, scheduler, info, build.kernels)
        answer = _supervise(standing, connection, message)
        if isinstance(answer, wire.Ran) and answer.ending.kind == "finished":
            standing.ran += 1
        else:
            standing = None
        try:
            wire.send(connection, answer)
        except OSError:  # nobody waits for it any more
            os._exit(0)


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass(slots=True)
class _Runner:
    """A fork that runs cases; `ran` counts those that it finished."""

    pid: int
    connection: socket.socket
    ran: int = 0

    def spent(self, fresh: bool) -> bool:
        return self.ran >= CASES_PER_RUNNER or (fresh and self.ran > 0)

    def gone(self) -> bool:
        """Whether it was killed while it waited: it says nothing then, so anything to read is its end."""
        return bool(select.select([self.connection], [], [], 0)[0])


def _start(caller: socket.socket, scheduler: Any, info: EngineInfo, runtime: wire.Kernels) -> _Runner:
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        caller.close()
        ours.close()
        die_with_parent()
        runner.serve(theirs, scheduler, info, runtime)
    theirs.close()
    return _Runner(child, ours)


def _supervise(standing: _Runner, caller: socket.socket, run: wire.Run) -> wire.Ran | wire.Failed:
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
    elif os.WEXITSTATUS(status) == runner.HARNESS_FAILED:
        return wire.Failed(f"last seen: {where}")
    elif code := os.WEXITSTATUS(status):
        detail = f"exited with status {code}"
    else:  # something called exit() in the middle
        detail = "exited without a trace"
    return wire.Ran(Ending(kind="crashed", detail=detail, where=where), False, standing.ran)


def _info(build: wire.Build, scheduler: Any) -> EngineInfo:
    import torch
    import transformers
    import triton

    return EngineInfo(
        name="sglang",
        version=identity.version(),
        device="cpu",
        kernels=build.kernels,
        torch=str(torch.__version__),
        triton=str(triton.__version__),
        transformers=str(transformers.__version__),
        worker=type(scheduler.draft_worker).__name__,
        overlap=bool(scheduler.enable_overlap),
        patches=tuple(patch.name for patch in build.patches),
        shims=(*boot.SHIMS, *(f"{name}: a stub, which raises when it is called" for name in stubs.imported())),
    )
