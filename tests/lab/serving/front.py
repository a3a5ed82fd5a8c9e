"""The process that imports SGLang with its HTTP front end once, and forks servers.

    caller ── socket ── front              imports SGLang and its front end; no server
                          └─ supervisor    one server: ends it when the caller hangs up, and says how it ended (server.py)
                               └─ SGLang's launch_server: HTTP, tokenizer manager
                                    ├─ scheduler
                                    └─ detokenizer

Started by servers.py, with the arguments of an engine's zygote: FD [VERSION ROOT [CHANGES]].
"""

import gc
import os
import signal
import socket
import sys

from eagletwin.harness.engines import protocol
from eagletwin.harness.engines.inside.importing import import_named, import_or_report

from .messages import Serve

PACKAGE = "sglang"


def main() -> None:
    """Serve the caller until it hangs up."""
    signal.signal(signal.SIGCHLD, lambda *_: _reap())  # whoever closed a server finds nothing of it left
    connection = import_or_report(_import)
    from eagletwin.harness.engines.inside import own_loader, supervise

    from . import server

    gc.freeze()  # keep the collector from touching, and so copying, pages that the children share
    protocol.send(connection, protocol.Ready(own_loader.version(PACKAGE)))
    while True:
        try:
            asked, descriptors = protocol.receive(connection, Serve)
        except (EOFError, ConnectionError):
            supervise.wait_for_all()
            os._exit(0)
        _reap()
        if os.fork() == 0:
            connection.close()
            server.serve(socket.socket(fileno=descriptors[0]), asked)
        os.close(descriptors[0])


def _import() -> None:
    """SGLang, as an engine has it, and its front end. Raises what its import raises."""
    from eagletwin.harness.engines.sglang import kernels
    from eagletwin.harness.engines.sglang.boot import boot, preimport

    from . import front_end

    def load() -> None:
        preimport.prepare(idle=front_end.idle(), spare=front_end.SPARE)
        boot.import_sglang()
        front_end.import_it()

    import_named(PACKAGE, sys.argv[2:], load)
    kernels.precompile()


def _reap() -> None:
    from eagletwin.harness.engines.inside.supervise import reap

    reap()
