"""The process that imports SGLang once and forks the rest: an engine for each configuration, runners of cases from it.

    caller ── socket ── zygote            imports SGLang; no scheduler
                          └─ engine       one configuration: patches applied, Scheduler built (engine.py)
                               └─ runner  steps the scheduler through one case after another, writes their traces (runner.py)

A crash, hang or leak of a case ends with its runner. Each process dies with its parent. Started by engines/process.py as
`python -m eagletwin.harness.engines.sglang.zygote FD [VERSION ROOT]`.
"""

import gc
import os
import signal
import socket
import sys
import traceback

from eagletwin.harness.engines import wire


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))  # it ends with the caller, and this process with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's to handle; it closes the socket
    gc.disable()  # imports make much that lives for ever; collecting it costs seconds
    try:
        from eagletwin.harness.engines.sglang import boot

        boot.import_sglang()
        from eagletwin.harness.engines.sglang import engine, identity, kernels, probes, ranks, supervise

        if len(sys.argv) > 2:
            identity.confirm(*sys.argv[2:])
        else:
            identity.confirm_installed()

        kernels.precompile()
    except BaseException as error:
        traceback.print_exc()  # first: whoever reads the answer ends this process
        sys.stderr.flush()
        wire.send(connection, wire.Refused(f"{type(error).__name__}: {error}", traceback.format_exc()))
        raise
    gc.freeze()  # keep the collector from touching, and so copying, pages that the children share
    wire.send(connection, wire.Ready(identity.version()))
    while True:
        try:
            message, descriptors = wire.receive(connection)
        except EOFError:
            return
        assert isinstance(message, wire.Build | wire.Probe)
        supervise.reap()
        if os.fork() == 0:
            connection.close()
            theirs = socket.socket(fileno=descriptors[0])
            if isinstance(message, wire.Probe):
                probes.serve(theirs, message)
            elif message.mode.tp > 1:
                ranks.serve(theirs, message, engine.launch_rank)
            else:
                engine.serve(theirs, message)
        os.close(descriptors[0])


if __name__ == "__main__":
    main()
