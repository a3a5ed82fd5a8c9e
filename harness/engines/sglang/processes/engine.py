"""One configuration of the real worker, forked from the zygote: it builds the scheduler, and forks what runs cases
(engines/inside/forking.py)."""

import gc
import os
import socket
import traceback
from pathlib import Path
from typing import Any, NoReturn

from msgspec.structs import replace

from eagletwin.harness.core.records import EngineInfo
from eagletwin.harness.core.run_spec import Mode
from eagletwin.harness.engines import protocol
from eagletwin.harness.engines.inside import blame, forking, patches, runner
from eagletwin.harness.engines.inside.blame import NotDriven
from eagletwin.harness.engines.inside.runner import CaptureFailed
from eagletwin.harness.engines.inside.supervise import die_with_parent

from .. import adapter, kernels
from ..boot import boot
from ..compat import workers
from ..stand_ins import stubs
from ..taps import speculation
from . import rank_group as ranks


def serve(connection: socket.socket, build: protocol.Build) -> NoReturn:
    """Answer the caller's messages until it hangs up."""
    die_with_parent()
    scheduler, info = stand(connection, replace(build, port=ranks.free_port()))
    forking.answer(adapter, connection, scheduler, info, build)


def launch_rank(theirs: socket.socket) -> int:
    """Fork a process that builds the scheduler of one rank and runs cases on it."""
    child = os.fork()
    if child == 0:
        die_with_parent()
        build, _ = protocol.receive(theirs)
        if not isinstance(build, protocol.Build):
            raise protocol.unexpected_message(build)
        os.environ.update(_several_on_a_cpu(build.mode))
        scheduler, info = stand(theirs, build)
        runner.serve(adapter, theirs, scheduler, info, build)
    return child


def _several_on_a_cpu(mode: Mode) -> dict[str, str]:
    """The environment variables that SGLang needs where several ranks or stages share a CPU.

    It refuses more of them than there are NUMA nodes, unless each is given cores; only kernels that are stubbed here would be
    bound to those. And where a torch with CUDA is installed it would take NCCL for ranks that have no GPU.
    """
    needed = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join("0" * mode.processes), "SGLANG_NCCL_SO_PATH": "none: there is no GPU"}
    # without it SGLang has EAGLE in the stages of a server of prefills alone
    return needed | ({"SGLANG_ENABLE_PP_SPEC": "1"} if mode.pp > 1 else {})


def stand(connection: socket.socket, build: protocol.Build) -> tuple[Any, EngineInfo]:
    """The scheduler, and what is reported of it to the caller. If it cannot be built, reports why and ends the process."""
    import torch

    try:
        # After a fork torch makes its pool of threads anew when it is first asked for, and two threads that ask at once (SGLang
        # loads weights in several) may find none: here one asks.
        torch.set_num_threads(1)
        boot.import_models(build.configuration, build.mode)
        forking.apply_patches(connection, build.patches)
        kernels.prepare(build.kernels, build.mode, boot.SHIMS)
        with kernels.building(build.kernels, build.mode), patches.watch_calls(build.foreseen):
            scheduler = boot.build_scheduler(build.configuration, build.mode, build.rank, build.port, plain=build.plain)
        changed, info = boot.changed_settings(scheduler, build.configuration, build.mode), _info(build, scheduler)
    except NotDriven as error:
        protocol.send(connection, protocol.Refused(str(error), "", ours=True))
        os._exit(0)
    except BaseException as error:
        failure = _capture_failure(error)
        if not build.mode.graphs or failure is None or blame.is_ours(failure, adapter.PACKAGE):
            protocol.send(connection, protocol.refusal_of(error))
            os._exit(0)
        scheduler, changed, info = CaptureFailed(failure), "", _info(build, None)
    if changed:
        protocol.send(connection, protocol.Refused(f"it changes {changed} without being asked", ""))
        os._exit(0)
    gc.freeze()
    protocol.send(connection, protocol.Built(info))
    return scheduler, info


def _capture_failure(error: BaseException) -> BaseException | None:
    """The error in a capture of a CUDA graph, which SGLang wraps in advice; None: it was raised elsewhere."""
    found: BaseException | None = None
    following: BaseException | None = error
    while following is not None:
        if any("cuda_graph" in Path(frame.filename).name for frame in traceback.extract_tb(following.__traceback__)):
            found = following
        following = following.__context__
    return found


def _info(build: protocol.Build, scheduler: Any) -> EngineInfo:
    return forking.info_of(
        build,
        adapter.PACKAGE,
        build.kernels if build.mode.device == "cpu" else "compiled",
        worker="" if scheduler is None else type(scheduler.draft_worker or scheduler.tp_worker).__name__,
        overlap=build.mode.overlap if scheduler is None else bool(scheduler.enable_overlap),
        shims=(*boot.SHIMS, *stubs.describe_stubs()),
        mode=build.mode.words,
        graphs=build.mode.graphs,
        tp=build.mode.tp,
        rank=build.rank,
        dtype=build.mode.dtype,
        parts=speculation.parts_of_worker(scheduler) if build.mode.device == "cuda" else (),
        pp=build.mode.pp,
        dp=build.mode.dp,
        first_layer=workers.first_layer(scheduler) if build.mode.pp > 1 else 0,
    )
