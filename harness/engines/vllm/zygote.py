"""The process that imports vLLM once and forks the rest (engines/inside/forking.py), started by engines/start.py as
`python -m eagletwin.harness.engines.vllm.zygote FD VERSION ROOT`."""

import contextlib
import gc
import os
import signal
import socket
import sys
import traceback
from typing import Any, NoReturn

from eagletwin.harness.core.records import EngineInfo
from eagletwin.harness.engines import protocol
from eagletwin.harness.engines.inside import changes, forking, own_loader
from eagletwin.harness.engines.inside.blame import NotDriven
from eagletwin.harness.engines.inside.supervise import die_with_parent, reap
from eagletwin.harness.families.weights import model_pair

from . import adapter, boot


def main() -> None:
    """Serve the caller until it hangs up."""
    connection = socket.socket(fileno=int(sys.argv[1]))  # it ends with the caller, and this process with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's to handle; it closes the socket
    gc.disable()  # imports make much that lives for ever; collecting it costs seconds
    try:
        own_loader.install(adapter.PACKAGE)
        if len(sys.argv) > 4:
            changes.install(sys.argv[4])
        boot.import_vllm()
        own_loader.confirm(adapter.PACKAGE, *sys.argv[2:4])
    except BaseException as error:
        with contextlib.suppress(OSError):  # the log cannot be written
            traceback.print_exc()  # first: the caller ends this process when it has read the answer
            sys.stderr.flush()
        protocol.send(connection, protocol.refusal_of(error))
        raise
    version = own_loader.version(adapter.PACKAGE)
    forking.serve_callers(connection, version, {protocol.Build: _serve}, _before_a_fork)


def _before_a_fork(message: protocol.Build) -> None:
    """Collect what ended, and make the model once for all engines like it."""
    reap()
    with forking.left_to_the_engine():
        model_pair(message.configuration.model)
    gc.freeze()


def _serve(connection: socket.socket, build: protocol.Build) -> NoReturn:
    """Build the engine core of one configuration, and answer its caller until it hangs up."""
    die_with_parent()
    forking.apply_patches(connection, build.patches)
    try:
        core = boot.build_core(build.configuration)
        info = _info(build, core)
    except NotDriven as error:
        protocol.send(connection, protocol.Refused(str(error), "", ours=True))
        os._exit(0)
    except BaseException as error:
        protocol.send(connection, protocol.refusal_of(error))
        os._exit(0)
    gc.freeze()
    protocol.send(connection, protocol.Built(info))
    forking.answer(adapter, connection, core, info, build)


def _info(build: protocol.Build, core: Any) -> EngineInfo:
    import torch
    import transformers
    import triton

    return EngineInfo(
        name=adapter.PACKAGE,
        version=own_loader.version(adapter.PACKAGE),
        device=build.mode.device,
        kernels=build.kernels,
        torch=str(torch.__version__),
        triton=str(triton.__version__),
        transformers=str(transformers.__version__),
        worker=type(boot.drafter_of(core)).__name__,
        patches=tuple(patch.name for patch in build.patches),
        shims=tuple(boot.SHIMS),
        mode=f"runner {build.configuration.vllm.model_runner.upper()}",
    )


if __name__ == "__main__":
    main()
