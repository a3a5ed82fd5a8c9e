"""The process that imports what SGLang imports of other packages, and forks a zygote for each SGLang (zygote.py).

    caller ── socket ── ancestor         imports torch, transformers and others; no SGLang
                ├─ socket ─┼─ zygote     imports one SGLang; answers the caller at a socket of its own
                └─ socket ─└─ ancestor   imports a tree that is edited; its zygotes follow the edits (inside/changes.py)

Started by engines/start.py as `python -m eagletwin.harness.engines.sglang.processes.ancestor FD`.
"""

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import tempfile
from typing import NoReturn

from eagletwin.harness.engines import protocol
from eagletwin.harness.engines.inside.supervise import die_with_parent

from . import zygote

_held: dict[socket.socket, int] = {}  # the leash of each zygote that runs, and its process


def main() -> None:
    """Fork zygotes until the caller hangs up. They end with this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's to handle; it closes the socket
    gc.disable()  # imports make much that lives for ever; collecting it costs seconds
    failed: BaseException | None = None
    try:
        from ..boot import preimport

        preimport.import_them()
    except BaseException as error:
        failed = error  # each zygote says so
    _fork_zygotes(socket.socket(fileno=int(sys.argv[1])), failed)


def _fork_zygotes(caller: socket.socket, failed: BaseException | None, *, follow: bool = False) -> None:
    """Until the caller hangs up. failed: what each zygote says; follow: they follow edits of the tree that was imported."""
    gc.freeze()
    _held.clear()
    ended, ends = os.pipe()
    for end in (ended, ends):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # a signal that Python does not know is not written to the pipe
    signal.set_wakeup_fd(ends, warn_on_full_buffer=False)
    while True:
        ready = select.select([caller.fileno(), ended, *map(socket.socket.fileno, _held)], [], [])[0]
        if ended in ready:
            os.read(ended, 4096)
        for leash, process in [*_held.items()]:
            if leash.fileno() in ready:  # the caller has let go of it
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
            elif not os.waitpid(process, os.WNOHANG)[0]:
                continue
            del _held[leash]
            leash.close()
        if caller.fileno() not in ready:
            continue
        try:
            message, descriptors = protocol.receive(caller)
        except (EOFError, ConnectionError):
            return
        if not isinstance(message, protocol.Import):
            raise protocol.unexpected_message(message)
        connection, leash = descriptors[0], socket.socket(fileno=descriptors[1])
        process = os.fork()
        if process == 0:
            for one in (caller, leash, *_held):
                one.close()
            os.close(ended)
            os.close(ends)
            _become(message, connection, failed, follow=follow)
        os.close(connection)
        _held[leash] = process


def _become(asked: protocol.Import, connection: int, failed: BaseException | None, *, follow: bool) -> NoReturn:
    """The zygote, or a further ancestor, as if Python had been started in this environment."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    die_with_parent()
    log = os.open(asked.log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    with contextlib.suppress(OSError):  # a folder that is gone
        os.chdir(asked.folder)
    before = _paths()
    os.environ.clear()
    os.environ.update(asked.environment)
    sys.path[:] = [*_paths(), *(path for path in sys.path if path not in before)]
    sys.pycache_prefix = asked.environment.get("PYTHONPYCACHEPREFIX")
    importlib.invalidate_caches()
    tempfile.tempdir = None
    sys.argv = ["zygote", str(connection), *asked.words]
    status = 0
    try:
        if asked.stays:
            _fork_zygotes(socket.socket(fileno=connection), failed or zygote.import_edited(), follow=True)
        else:
            zygote.main(failed=failed, follow=follow)
    except BaseException:  # it has told the caller
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _paths() -> list[str]:
    """What this environment puts in front of the installed packages."""
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


if __name__ == "__main__":
    main()
