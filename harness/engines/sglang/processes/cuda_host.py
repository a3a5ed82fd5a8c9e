"""Answers the caller where the worker runs on a GPU. It imports no SGLang: what has used a GPU cannot be forked.

    caller ── socket ── cuda_host           imports no SGLang
                          └─ supervisor     one configuration, a fork of it: starts another worker when one dies (ranks.py)
                               └─ worker    a process of its own, a rank each: builds the scheduler, and runs cases (worker.py)

A worker that dies (an illegal access, a device assert) costs its case; the one after it must come up on the same device, else
the run stops. engines/start.py starts it as `python -m …processes.cuda_host FD [VERSION ROOT [CHANGES]]`.
"""

import importlib.metadata
import os
import signal
import socket
import subprocess
import sys

from eagletwin.harness.core.files import RUN_MODULE
from eagletwin.harness.engines import protocol
from eagletwin.harness.engines.inside.supervise import reap

from . import rank_group as ranks


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))  # it ends with the caller, and this process with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's to handle; it closes the socket
    try:
        version = sys.argv[2] if len(sys.argv) > 2 else importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        protocol.send(connection, protocol.Refused("no sglang is installed here", ""))
        return
    protocol.send(connection, protocol.Ready(version))
    while True:
        try:
            message, descriptors = protocol.receive(connection)
        except EOFError:
            return
        if not isinstance(message, protocol.Build):
            raise protocol.unexpected_message(message)
        reap()
        if os.fork() == 0:
            connection.close()
            ranks.serve(socket.socket(fileno=descriptors[0]), message, _launch)
        os.close(descriptors[0])


def _launch(theirs: socket.socket) -> int:
    """Start the process of a worker, or of one rank of it."""
    process = subprocess.Popen(
        [*RUN_MODULE, "eagletwin.harness.engines.sglang.processes.worker", str(theirs.fileno()), *sys.argv[2:]],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
    )
    return process.pid


if __name__ == "__main__":
    main()
