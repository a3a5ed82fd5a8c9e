"""The process that imports SGLang once and forks the rest: an engine for each configuration, runners of cases from it.

    caller ── socket ── zygote            imports SGLang; no scheduler
                          └─ engine       one configuration: patches applied, Scheduler built (engine.py)
                               └─ runner  steps the scheduler through one case after another, writes their traces (runner.py)

Further callers may join (wire.Join): a search on several cores imports SGLang once. What one of them asked for is its own, and
so is the folder of its engines' files, since engines of two callers stand and run at once.
A crash, hang or leak of a case ends with its runner. Each process dies with its parent. Forked by ancestor.py, or, where this
SGLang needs other packages of others, started by engines/start.py as
`python -m eagletwin.harness.engines.sglang.processes.zygote FD [VERSION ROOT [CHANGES]]`.
"""

import contextlib
import gc
import itertools
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Iterator

from eagletwin.harness.engines import protocol
from eagletwin.harness.families import RECIPES, family_of
from eagletwin.harness.families.weights import model_pair


def main(*, front: bool = False, failed: BaseException | None = None) -> None:
    """Serve the caller until it hangs up. front: with SGLang's HTTP front end; servers are forked, and no engines.

    failed: what was raised when others' packages were imported"""
    connection = socket.socket(fileno=int(sys.argv[1]))  # it ends with the caller, and this process with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's to handle; it closes the socket
    if front:
        signal.signal(signal.SIGCHLD, _collect)  # whoever closed a server finds nothing of it left
    gc.disable()  # imports make much that lives for ever; collecting it costs seconds
    try:
        if failed is not None:
            raise failed
        _import_sglang(front=front)
    except BaseException as error:
        with contextlib.suppress(OSError):  # the log cannot be written
            traceback.print_exc()  # first: the caller ends this process when it has read the answer
            sys.stderr.flush()
        protocol.send(connection, protocol.refusal_of(error))
        raise
    _serve(connection, front=front)


def _serve(connection: socket.socket, *, front: bool) -> None:
    """Say that SGLang is imported; then fork what the callers ask for until the first of them hangs up."""
    from .. import call_function as probes
    from .. import own_loader
    from . import engine, server, supervise
    from . import rank_group as ranks

    gc.freeze()  # keep the collector from touching, and so copying, pages that the children share
    ready = protocol.Ready(own_loader.sglang_version())
    protocol.send(connection, ready)
    callers = {connection: ""}  # and the folder for what the engines of a further one leave
    joined = itertools.count()
    while True:
        caller = select.select(callers, [], [])[0][0]
        try:
            message, descriptors = protocol.receive(caller)
        except (EOFError, ConnectionError):
            if caller is not connection:  # a further one: the others go on
                shutil.rmtree(callers.pop(caller), ignore_errors=True)
                caller.close()
                continue
            if front:
                supervise.wait_for_all()
                os._exit(0)
            return
        if isinstance(message, protocol.Join) and not front:
            further = socket.socket(fileno=descriptors[0])
            callers[further] = os.path.join(tempfile.gettempdir(), f"j-{next(joined)}")
            with contextlib.suppress(OSError):  # it has just ended
                protocol.send(further, ready)
            continue
        if not isinstance(message, protocol.Serve if front else protocol.Build | protocol.Probe):
            raise protocol.unexpected_message(message)
        _before_a_fork(message)
        if os.fork() == 0:
            _leave_files_in(callers[caller])
            for one in callers:
                one.close()
            theirs = socket.socket(fileno=descriptors[0])
            if isinstance(message, protocol.Serve):
                server.serve(theirs, message)
            elif isinstance(message, protocol.Probe):
                probes.serve(theirs, message)
            elif message.mode.processes > 1:
                ranks.serve(theirs, message, engine.launch_rank)
            else:
                engine.serve(theirs, message)
        os.close(descriptors[0])


def _leave_files_in(folder: str) -> None:
    """What this process leaves for a while lies in this folder; empty: where that of its parent does."""
    if folder:
        with contextlib.suppress(OSError):  # the engine meets it again, and tells the caller
            os.makedirs(folder, exist_ok=True)
            os.environ["TMPDIR"] = tempfile.tempdir = folder


def _import_sglang(*, front: bool) -> None:
    """That which was asked for, with all that engines need of it. Raises what its import raises."""
    from .. import changes, kernels, own_loader
    from ..boot import boot

    if len(sys.argv) > 2:
        own_loader.install()
    own_loader.note_blocks()
    if len(sys.argv) > 4:
        changes.install(sys.argv[4])
    boot.import_sglang(front=front)
    if len(sys.argv) > 2:
        own_loader.confirm_sglang(*sys.argv[2:4])
    else:
        own_loader.confirm_installed_sglang()
    kernels.precompile()


def _before_a_fork(message: object) -> None:
    """Collect what ended, make the model, and import what an engine needs, once for all like it. Of a changed tree each engine
    says itself what it imported."""
    from .. import kernels
    from ..boot import server_arguments
    from ..graphs.install import prepare_gates
    from .supervise import reap

    reap()
    if not isinstance(message, protocol.Build):
        return
    with left_to_the_engine():
        model_pair(message.configuration.model)
    if len(sys.argv) <= 4:
        recipe = RECIPES[message.configuration.model]
        server_arguments.prepare(family_of(recipe).modules)
        if recipe.target.states:
            with left_to_the_engine():
                kernels.precompile_for_states()
        if message.mode.graphs and message.mode.device == "cpu":
            prepare_gates(frozen=recipe.frozen)
    gc.freeze()


@contextlib.contextmanager
def left_to_the_engine() -> Iterator[None]:
    """What fails here fails in the engine again, which tells the caller. The log has it in any case."""
    try:
        yield
    except Exception:
        with contextlib.suppress(OSError):  # the log cannot be written
            traceback.print_exc()


def _collect(*_: object) -> None:
    from .supervise import reap

    reap()


if __name__ == "__main__":
    main()
