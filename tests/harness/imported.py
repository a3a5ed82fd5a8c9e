"""Commands in forks of a process that has imported torch and typer, and nothing of eagletwin: importing them costs two seconds
of a core, and what a command is asked here nearly none.

Else it is as a process of its own: arguments, environment, folder, streams, `__main__`, exit code. What is asked of an import,
of what stands before the installed packages, or of how the interpreter ends, needs `subprocess`.
"""

import atexit
import gc
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

_server: socket.socket | None = None


def run(command: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """`python -P COMMAND`, of which the first word is a file, `-m` or `-c`."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        connection = _connected()
        asked = json.dumps({"command": [*command], "cwd": str(cwd), "environment": dict(environment)}).encode()
        socket.send_fds(connection, [len(asked).to_bytes(4, "big")], [out.fileno(), errors.fileno()])
        connection.sendall(asked)
        code = int.from_bytes(_exactly(connection, 4), "big", signed=True)
        for file in (out, errors):
            file.seek(0)
        return subprocess.CompletedProcess([*command], code, out.read(), errors.read())


def _connected() -> socket.socket:
    """The process ends when that of the tests does."""
    global _server
    if _server is None:
        _server, theirs = socket.socketpair()
        command = [sys.executable, "-P", __file__, str(theirs.fileno())]
        subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL).returncode = 0  # nobody waits for it
        theirs.close()
        atexit.register(_server.close)
    return _server


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
        size, streams, _, _ = socket.recv_fds(connection, 4, 2)
        if not size:
            os._exit(0)
        asked = json.loads(_exactly(connection, int.from_bytes(size, "big")))
        child = os.fork()
        if child == 0:
            connection.close()
            for number, stream in enumerate(streams, 1):
                os.dup2(stream, number)
                os.close(stream)
            os.chdir(asked["cwd"])
            os.environ.clear()
            os.environ.update(asked["environment"])
            return asked["command"]  # type: ignore[no-any-return]
        for stream in streams:
            os.close(stream)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        connection.sendall(status.to_bytes(4, "big", signed=True))


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
    import rich.console  # noqa: F401
    import torch  # noqa: F401
    import typer  # noqa: F401

    gc.freeze()  # pages that forks share are not touched
    command = _forked(socket.socket(fileno=int(sys.argv[1])))
    code = ended(lambda: _run(*command))
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)  # what Python does besides takes down torch, for a third of a second
