"""One configuration of the real worker on a GPU, a process of its own: it builds the scheduler, then runs its cases.

Started by cuda_host.py as `python -m eagletwin.harness.engines.sglang.processes.worker FD [VERSION ROOT [CHANGES]]`.
"""

import gc
import os
import signal
import socket
import sys
from functools import partial

from eagletwin.harness.engines import protocol
from eagletwin.harness.engines.inside.importing import import_named
from eagletwin.harness.engines.inside.supervise import die_with_parent


def main() -> None:
    die_with_parent()
    connection = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    build, _ = protocol.receive(connection)
    if not isinstance(build, protocol.Build):
        raise protocol.unexpected_message(build)
    gc.disable()  # imports make much that lives for ever; collecting it costs seconds
    try:
        from eagletwin.harness.engines.inside import runner

        from .. import adapter
        from ..boot import boot

        import_named(adapter.PACKAGE, sys.argv[2:], partial(boot.import_sglang, build.mode))
        from . import engine
    except BaseException as error:
        protocol.send(connection, protocol.refusal_of(error, "SGLang cannot be imported: "))
        os._exit(0)
    scheduler, info = engine.stand(connection, build)
    gc.enable()
    runner.serve(adapter, connection, scheduler, info, build)


if __name__ == "__main__":
    main()
