"""The process that imports SGLang once and forks the rest: an engine for each configuration, a child of it for each case.

    caller ── socket ── zygote            imports SGLang; no scheduler
                          └─ engine       one configuration: patches applied, Scheduler built
                               └─ case    one case: steps the scheduler, writes the trace, exits

A crash, hang or leak of a case ends with its process. Each process dies with its parent. Started by engines/process.py as
`python -m eagletwin.harness.engines.sglang.zygote FD`.
"""

import ctypes
import faulthandler
import gc
import os
import select
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from eagletwin.harness.engines import wire
from eagletwin.harness.trace import HEADER, Ending, EngineInfo, Recorder, new_header, write_trace

_PR_SET_PDEATHSIG = 1
_HARNESS_FAILED = 70  # exit status of a case's process that failed outside the worker


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))  # it ends with the caller, and this process with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's to handle; it closes the socket
    gc.disable()  # imports make much that lives for ever; collecting it costs seconds
    try:
        from eagletwin.harness.engines.sglang import boot

        boot.import_sglang()
        import sglang

        from eagletwin.harness.engines.sglang import kernels

        kernels.precompile()
    except BaseException as error:
        wire.send(connection, wire.Refused(f"{type(error).__name__}: {error}", traceback.format_exc()))
        raise
    gc.freeze()  # keep the collector from touching, and so copying, pages that the children share
    wire.send(connection, wire.Ready(str(sglang.__version__)))
    while True:
        try:
            message, descriptors = wire.receive(connection)
        except EOFError:
            return
        assert isinstance(message, wire.Build)
        _reap()
        if os.fork() == 0:
            connection.close()
            _engine(socket.socket(fileno=descriptors[0]), message)
        os.close(descriptors[0])


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _engine(connection: socket.socket, build: wire.Build) -> NoReturn:
    """One configuration. Answers Run messages until the caller hangs up."""
    _die_with_parent()
    from eagletwin.harness.engines.sglang import boot, patches

    try:
        for patch in build.patches:
            patches.apply(patch)
    except patches.PatchFailed as error:
        wire.send(connection, wire.PatchDidNotApply(str(error)))
        os._exit(0)
    try:
        scheduler = boot.build_scheduler(build.configuration)
    except BaseException as error:
        wire.send(connection, wire.Refused(f"{type(error).__name__}: {error}", traceback.format_exc()))
        os._exit(0)
    gc.freeze()
    info = _info(build)
    wire.send(connection, wire.Built(info))
    while True:
        try:
            message, _ = wire.receive(connection)
        except (EOFError, ConnectionError):
            os._exit(0)
        assert isinstance(message, wire.Run)
        wire.send(connection, _supervise(scheduler, message, info, build.kernels))


def _supervise(scheduler: Any, run: wire.Run, info: EngineInfo, kernels: wire.Kernels) -> wire.Ran | wire.Failed:
    """Fork the case; watch its progress; say how it ended."""
    progress, report = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(progress)
        _case(scheduler, run, info, kernels, report)
    os.close(report)
    begun = stepped = time.monotonic()
    where, overdue = "start", ""
    while True:
        now = time.monotonic()
        left = min(stepped + run.step_seconds, begun + run.case_seconds) - now
        if left <= 0:
            limit = "case" if now - begun >= run.case_seconds else "step"
            seconds = run.case_seconds if limit == "case" else run.step_seconds
            overdue = f"no end of the {limit} within {seconds:g} s"
            os.kill(child, signal.SIGUSR2)  # write all stacks to engine.log, where Python still can
            select.select([progress], [], [], 1.0)
            os.kill(child, signal.SIGKILL)
            break
        if select.select([progress], [], [], left)[0]:
            data = os.read(progress, 65536)
            if not data:
                break
            stepped = time.monotonic()
            where = data.decode().rstrip("\n").rpartition("\n")[2]
    os.close(progress)
    _, status = os.waitpid(child, 0)
    if overdue:
        return wire.Ran(Ending(kind="hung", detail=overdue, where=where), False)
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        return wire.Ran(Ending(kind="crashed", detail=f"killed by {name}", where=where), False)
    code = os.WEXITSTATUS(status)
    if code == _HARNESS_FAILED:
        return wire.Failed(f"last seen: {where}")
    if code:
        return wire.Ran(Ending(kind="crashed", detail=f"exited with status {code}", where=where), False)
    if not os.path.exists(os.path.join(run.folder, HEADER)):  # something called exit() in the middle
        return wire.Ran(Ending(kind="crashed", detail="exited without a trace", where=where), False)
    return wire.Ran(Ending(kind="finished"), True)  # the trace holds its own ending


def _case(scheduler: Any, run: wire.Run, info: EngineInfo, runtime: wire.Kernels, report: int) -> NoReturn:
    """Run one case, write its trace, exit. A Python exception of the worker is an ending; anything worse ends the process."""
    try:
        _die_with_parent()
        log = os.open(os.path.join(run.folder, "engine.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        faulthandler.enable(file=2)
        faulthandler.register(signal.SIGUSR2, file=2)
        from eagletwin.harness.engines.sglang import drive, kernels, patches, stubs

        recorder, last = Recorder(), ["start"]

        def reached(stage: str) -> None:
            iteration = max((record.iteration for record in recorder.records[-1:]), default=0)
            last[0] = f"{stage}, iteration {iteration}"
            os.write(report, f"{last[0]}\n".encode())

        try:
            import torch

            kernels.start(runtime, scheduler)
            with torch.inference_mode():
                drive.drive(scheduler, run.case, recorder, reached)
            ending = Ending(kind="finished")
        except drive.EndlessCase as error:
            ending = Ending(kind="hung", detail=str(error), where=last[0])
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            ending = Ending(kind="crashed", detail=_brief(error), where=last[0])
        if stubs.called and ending.kind == "finished":  # SGLang swallowed the exception, and so skipped a kernel
            ending = Ending(
                kind="crashed", detail=f"stub {stubs.called[0]} was called and the exception swallowed", where=last[0]
            )
        ending = kernels.violated(last[0]) or ending
        header = new_header(run.case, info, ending, recorder.records, kernels.fallbacks(), patches.idle())
        write_trace(Path(run.folder), header, recorder.tensors)
    except BaseException:  # never leave by return or raise: this is a fork, and above it stands the engine's own loop
        traceback.print_exc()
        os._exit(_HARNESS_FAILED)
    os._exit(0)


def _brief(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(frame.filename).name}:{frame.lineno} in {frame.name})"


def _info(build: wire.Build) -> EngineInfo:
    import sglang
    import torch
    import triton

    from eagletwin.harness.engines.sglang import boot, stubs

    return EngineInfo(
        name="sglang",
        version=str(sglang.__version__),
        device="cpu",
        kernels=build.kernels,
        torch=str(torch.__version__),
        triton=str(triton.__version__),
        patches=tuple(patch.name for patch in build.patches),
        shims=(*boot.SHIMS, *(f"{name}: a stub, which raises when it is called" for name in stubs.imported())),
    )


if __name__ == "__main__":
    main()
