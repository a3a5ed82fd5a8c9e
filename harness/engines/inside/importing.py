"""How a process imports its engine, and says so. It imports nothing heavy itself: the caller is told of all that fails."""

import contextlib
import gc
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence

from eagletwin.harness.engines import protocol


def import_or_report(load: Callable[[], None]) -> socket.socket:
    """Import an engine for the caller whose connection is the program's first argument, and return it. It ends with the caller,
    and this process with it. Raises what `load` raises, after the caller has it."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's to handle; it closes the socket
    gc.disable()  # imports make much that lives for ever; collecting it costs seconds
    try:
        load()
    except BaseException as error:
        with contextlib.suppress(OSError):  # the log cannot be written
            traceback.print_exc()  # first: the caller ends this process when it has read the answer
            sys.stderr.flush()
        too_late = isinstance(error, protocol.CannotFollow)
        protocol.send(connection, protocol.TooLate() if too_late else protocol.refusal_of(error))
        raise
    return connection


def import_named(package: str, named: Sequence[str], load: Callable[[], None]) -> None:
    """Import the engine that is named [VERSION, ROOT [, CHANGES]]; without a name, the installed one. Raises what `load`
    raises, and ImportError where Python imports another one."""
    from . import changes, own_loader

    if named:
        own_loader.install(package)
    own_loader.note_blocks()
    if named:
        changes.install(*named[2:3])
    load()
    if named:
        own_loader.confirm(package, *named[:2])
    else:
        own_loader.confirm_installed(package)
