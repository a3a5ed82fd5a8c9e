"""The process that imports vLLM once and forks the rest (engines/inside/forking.py), started by engines/start.py as
`python -m eagletwin.harness.engines.vllm.zygote FD VERSION ROOT`."""

import gc
import os
import socket
import sys
from functools import partial
from typing import NoReturn

from eagletwin.harness.engines import protocol
from eagletwin.harness.engines.inside import forking, own_loader
from eagletwin.harness.engines.inside.blame import NotDriven
from eagletwin.harness.engines.inside.importing import import_named, import_or_report
from eagletwin.harness.engines.inside.supervise import die_with_parent
from eagletwin.harness.families.weights import model_pair

from . import adapter, boot


def main() -> None:
    """Serve the caller until it hangs up."""
    connection = import_or_report(partial(import_named, adapter.PACKAGE, sys.argv[2:], boot.import_vllm))
    version = own_loader.version(adapter.PACKAGE)
    forking.serve_callers(connection, version, {protocol.Build: _serve}, _before_a_fork)


def _before_a_fork(message: protocol.Build) -> None:
    """Make the model once for all engines like it."""
    with forking.left_to_the_engine():
        model_pair(message.configuration.model)
    gc.freeze()


def _serve(connection: socket.socket, build: protocol.Build) -> NoReturn:
    """Build the engine core of one configuration, and answer its caller until it hangs up."""
    die_with_parent()
    try:
        forking.apply_patches(connection, build.patches)
        core = boot.build_core(build.configuration)
        info = forking.info_of(
            build,
            adapter.PACKAGE,
            build.kernels,
            worker=type(boot.drafter_of(core)).__name__,
            shims=tuple(boot.SHIMS),
            mode=f"runner {build.configuration.vllm.model_runner.upper()}",
        )
    except NotDriven as error:
        protocol.send(connection, protocol.Refused(str(error), "", ours=True))
        os._exit(0)
    except BaseException as error:
        protocol.send(connection, protocol.refusal_of(error))
        os._exit(0)
    gc.freeze()
    protocol.send(connection, protocol.Built(info))
    forking.answer(adapter, connection, core, info, build)


if __name__ == "__main__":
    main()
