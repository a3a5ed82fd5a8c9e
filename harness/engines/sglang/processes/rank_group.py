"""One configuration whose processes each build the scheduler and run cases on it: the supervisor of a worker on a GPU, and of
one of several ranks on either device.

    zygote.py, cuda_host.py
      └─ supervisor    a fork of it: watches the ranks of one configuration, and starts others when one of them ends
           └─ rank …   a process each: builds the scheduler of its rank, runs the cases in lock-step with the others

What has used a GPU cannot be forked, nor what is connected to other ranks: threads that serve the connections would be missing.
"""

import os
import select
import socket
from collections.abc import Callable
from typing import NoReturn

from msgspec.structs import replace

from eagletwin.harness.core.terminal import describe_exit
from eagletwin.harness.engines import protocol
from eagletwin.harness.engines.inside.supervise import Runner, die_with_parent, supervise

# What starts the process of a rank: hands it one end of a connection, through which a Build will come, and returns its id.
Launch = Callable[[socket.socket], int]

# Ports at which ranks meet (a single rank too): below those that Linux gives to connections (net.ipv4.ip_local_port_range).
_FIRST_PORT, _PORTS = 20000, 10000


def serve(caller: socket.socket, build: protocol.Build, launch: Launch) -> NoReturn:
    """Answer the caller's Run messages until it hangs up."""
    die_with_parent()
    standing, answer = _start(build, launch)
    protocol.send(caller, answer)
    if standing is None:
        os._exit(0)
    while True:
        try:
            run, _ = protocol.receive(caller)
        except (EOFError, ConnectionError):
            os._exit(0)
        if not isinstance(run, protocol.Run):
            raise protocol.unexpected_message(run)
        # a worker on a GPU takes many seconds to build, and is reset instead (drive.py)
        spent = build.mode.device == "cpu" and run.fresh and standing is not None and standing.ran > 0
        if standing is not None and (spent or standing.is_gone()):
            standing.kill()
            standing = None
        if standing is None:
            standing, answer = _start(build, launch)
            if standing is None:
                _send(caller, protocol.Failed(f"the worker died, and another does not come up on the same device: {answer}"))
                os._exit(0)
        if run.fresh:
            standing.ran = 0
        ended = supervise(standing, caller, run)
        if isinstance(ended, protocol.Ran) and ended.ending.kind == "finished":
            standing.ran += 1
        else:
            standing = None
        _send(caller, ended)


def _send(caller: socket.socket, message: protocol.Ran | protocol.Failed) -> None:
    try:
        protocol.send(caller, message)
    except OSError:  # the caller no longer waits
        os._exit(0)


def _start(
    build: protocol.Build, launch: Launch
) -> tuple[Runner | None, protocol.Built | protocol.Refused | protocol.PatchDidNotApply]:
    """A worker with the scheduler built and what its first rank says of it; or None, and why it could not be built."""
    standing = Runner([], [])
    port = free_port()
    for rank in range(build.mode.processes):
        ours, theirs = socket.socketpair()
        with theirs:
            standing.pids.append(launch(theirs))
        standing.connections.append(ours)
        protocol.send(ours, replace(build, rank=rank, port=port))
    said: dict[int, protocol.Built] = {}
    while len(said) < build.mode.processes:  # they wait for each other, so one that will not be built is heard at once
        waiting = [at for rank, at in enumerate(standing.connections) if rank not in said]
        for connection in select.select(waiting, [], [])[0]:
            rank = standing.connections.index(connection)
            answer = _built(standing, rank)
            if not isinstance(answer, protocol.Built):
                standing.kill()
                return None, answer
            said[rank] = answer
    return standing, said[0]


def _built(standing: Runner, rank: int) -> protocol.Built | protocol.Refused | protocol.PatchDidNotApply:
    try:
        answer, _ = protocol.receive(standing.connections[rank])
    except (EOFError, ConnectionError):
        _, status = os.waitpid(standing.pids.pop(rank), 0)
        return protocol.Refused(f"its process {describe_exit(os.waitstatus_to_exitcode(status))} while it was built", "")
    if not isinstance(answer, protocol.Built | protocol.Refused | protocol.PatchDidNotApply):
        raise protocol.unexpected_message(answer)
    return answer


def free_port() -> int:
    """A free port. The search begins at a port that follows from this process's id, so that two engines that start at once try
    different ports: SGLang's own search, among all ports, chose one port twice when 28 engines started together."""
    for offset in range(_PORTS):
        port = _FIRST_PORT + (os.getpid() * 7 + offset) % _PORTS
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no port from {_FIRST_PORT} to {_FIRST_PORT + _PORTS - 1} is free, at which ranks could meet")
