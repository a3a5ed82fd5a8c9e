"""Commands in forks of a process that has imported what they import of others: torch and typer, say, and nothing of eagletwin.
Importing them costs two seconds of a core, and what a command is asked here nearly none.

Else it is as a process of its own: arguments, environment, folder, streams, `__main__`, exit code. What is asked of an import,
of what stands before the installed packages, or of how the interpreter ends, needs `subprocess`.
"""

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO


class Imported:
    """A process that has imported these modules as far as they are there, in this environment, from which commands are forked,
    one at a time."""

    def __init__(self, *modules: str, environment: Mapping[str, str] | None = None) -> None:
        self._modules, self._environment = modules, environment
        self._socket: socket.socket | None = None

    def run(self, command: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        """`python -P COMMAND`, of which the first word is a file, `-m` or `-c`."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
            self.start(command, cwd, environment, out.fileno(), errors.fileno())
            code = self.ended()
            for file in (out, errors):
                file.seek(0)
            return subprocess.CompletedProcess([*command], code, out.read(), errors.read())

    def start(
        self,
        command: Sequence[str],
        cwd: Path,
        environment: Mapping[str, str],
        out: int,
        errors: int,
        handed: Sequence[int] = (),
    ) -> int:
        """The number of the process, which has begun. out, errors: descriptors of its streams; handed: others that it has,
        as numbers which are the same there. `ended` is asked before another is started."""
        connection = self._connected()
        asked = {"command": [*command], "cwd": str(cwd), "environment": dict(environment), "descriptors": [1, 2, *handed]}
        data = json.dumps(asked).encode()
        socket.send_fds(connection, [len(data).to_bytes(4, "big")], [out, errors, *handed])
        connection.sendall(data)
        return int.from_bytes(_exactly(connection, 4), "big")

    def ended(self) -> int:
        """Wait for the end of the process: its exit code, or the number of the signal that ended it, negative."""
        return int.from_bytes(_exactly(self._connected(), 4), "big", signed=True)

    def _connected(self) -> socket.socket:
        """The process ends when that of the tests does."""
        if self._socket is None:
            self._socket, theirs = socket.socketpair()
            command = [sys.executable, "-P", __file__, str(theirs.fileno()), *self._modules]
            started = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=self._environment)
            started.returncode = 0  # nobody waits for it
            theirs.close()
            atexit.register(self._socket.close)
        return self._socket


shared = Imported("rich.console", "torch", "typer")
run = shared.run


def _exactly(connection: socket.socket, size: int) -> bytes:
    read = b""
    while len(read) < size:
        more = connection.recv(size - len(read))
        if not more:
            raise EOFError("the process that has imported torch is gone")
        read += more
    return read


def _forked(connection: socket.socket) -> list[str]:
    """The command, in the process that is to run it."""
    while True:
        size, received, _, _ = socket.recv_fds(connection, 4, 16)
        if not size:
            os._exit(0)
        asked = json.loads(_exactly(connection, int.from_bytes(size, "big")))
        child = os.fork()
        if child == 0:
            connection.close()
            above = [fcntl.fcntl(one, fcntl.F_DUPFD, 1 + max(asked["descriptors"])) for one in received]  # out of the way
            for one in received:
                os.close(one)
            for number, one in zip(asked["descriptors"], above, strict=True):
                os.dup2(one, number)
                os.close(one)
            sys.stdout, sys.stderr = _stream(1, sys.stdout), _stream(2, sys.stderr)
            os.chdir(asked["cwd"])
            os.environ.clear()
            os.environ.update(asked["environment"])
            return asked["command"]  # type: ignore[no-any-return]
        for one in received:
            os.close(one)
        connection.sendall(child.to_bytes(4, "big"))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        connection.sendall(status.to_bytes(4, "big", signed=True))


def _stream(number: int, before: TextIO) -> TextIO:
    """As Python makes it: whether it is a terminal, or can be sought in, is asked once."""
    buffering = 1 if number == 2 else -1
    return open(number, "w", buffering, encoding=before.encoding, errors=before.errors, closefd=False)


def _run(how: str, *words: str) -> None:
    """As Python does, with a `__main__` of its own."""
    if how == "-m":
        sys.argv = [*words]
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    elif how == "-c":
        sys.argv = ["-c", *words[1:]]
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(words[0], "<string>", "exec"), sys.modules["__main__"].__dict__)
    else:
        sys.argv = [how, *words]
        runpy.run_path(how, run_name="__main__")


def ended(act: Callable[[], object]) -> int:
    """What Python ends with where this is all that it does."""
    try:
        act()
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    for name in sys.argv[2:]:
        with contextlib.suppress(ImportError):  # what needs it imports it again, and gets the error
            importlib.import_module(name)
    gc.freeze()  # pages that forks share are not touched
    command = _forked(socket.socket(fileno=int(sys.argv[1])))
    code = ended(lambda: _run(*command))
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)  # what Python does besides takes down torch, for a third of a second
