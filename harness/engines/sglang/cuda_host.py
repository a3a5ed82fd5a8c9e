"""Answers the caller where the worker runs on a GPU. It imports no SGLang: what has used a GPU cannot be forked.

    caller ── socket ── cuda_host           imports no SGLang
                          └─ supervisor     one configuration, a fork of it: watches its worker, starts another when it dies
                               └─ worker    a process of its own: builds the scheduler, and runs cases (worker.py)

A worker that dies (an illegal access, a device assert) costs its case; the one after it must come up on the same device, else
the run stops. Started by engines/start.py as `python -m eagletwin.harness.engines.sglang.cuda_host FD [VERSION ROOT]`.
"""

import importlib.metadata
import os
import signal
import socket
import subprocess
import sys
from typing import NoReturn

from eagletwin.harness.engines import wire

from .supervise import Runner, die_with_parent, reap, supervise


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))  # it ends with the caller, and this process with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's to handle; it closes the socket
    try:
        version = sys.argv[2] if len(sys.argv) > 2 else importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        wire.send(connection, wire.Refused("no sglang is installed here", ""))
        return
    wire.send(connection, wire.Ready(version))
    while True:
        try:
            message, descriptors = wire.receive(connection)
        except EOFError:
            return
        assert isinstance(message, wire.Build)
        reap()
        if os.fork() == 0:
            connection.close()
            serve(socket.socket(fileno=descriptors[0]), message)
        os.close(descriptors[0])


def serve(caller: socket.socket, build: wire.Build) -> NoReturn:
    """Answer the caller's Run messages until it hangs up."""
    die_with_parent()
    worker, answer = _start(build)
    wire.send(caller, answer)
    if worker is None:
        os._exit(0)
    while True:
        try:
            run, _ = wire.receive(caller)
        except (EOFError, ConnectionError):
            os._exit(0)
        assert isinstance(run, wire.Run)
        if worker is None or worker.gone():
            worker, answer = _start(build)
            if worker is None:
                _send(caller, wire.Failed(f"the worker died, and another does not come up on the same device: {answer}"))
                os._exit(0)
        if run.fresh:
            worker.ran = 0
        ended = supervise(worker, caller, run)
        if isinstance(ended, wire.Ran) and ended.ending.kind == "finished":
            worker.ran += 1
        else:
            worker.connection.close()
            worker = None
        _send(caller, ended)


def _send(caller: socket.socket, message: wire.Ran | wire.Failed) -> None:
    try:
        wire.send(caller, message)
    except OSError:  # nobody waits for it any more
        os._exit(0)


def _start(build: wire.Build) -> tuple[Runner | None, wire.Built | wire.Refused | wire.PatchDidNotApply]:
    """A worker with the scheduler built, and what it says of itself; without one, why there is none."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "eagletwin.harness.engines.sglang.worker", str(theirs.fileno()), *sys.argv[2:]],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
    wire.send(ours, build)
    try:
        answer, _ = wire.receive(ours)
    except (EOFError, ConnectionError):
        process.wait()
        status = process.returncode
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        return None, wire.Refused(f"the process died while the scheduler was built ({how})", "")
    assert isinstance(answer, wire.Built | wire.Refused | wire.PatchDidNotApply)
    return (Runner(process.pid, ours) if isinstance(answer, wire.Built) else None), answer


if __name__ == "__main__":
    main()
