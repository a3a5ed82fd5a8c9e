"""The caller's side of the process from which zygotes are forked: it has imported torch and what else every SGLang imports."""

import atexit
import contextlib
import os
import pkgutil
import select
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from eagletwin.harness.core.environment import RUN_MODULE

from . import protocol
from .source import Source

_MODULE = "eagletwin.harness.engines.sglang.processes.ancestor"

_standing: "_Ancestor | None" = None


class Leash:
    """A zygote, as subprocess.Popen has a process. Its ancestor holds the other end of a connection: it ends the zygote when
    something is said at this end, and shuts the other when the zygote has ended."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection.detach()  # -1: the zygote has ended

    def poll(self) -> int | None:
        """None: it runs."""
        return 0 if self._connection < 0 or select.select([self._connection], [], [], 0)[0] else None

    def kill(self) -> None:
        with contextlib.suppress(OSError):  # it has ended
            os.write(self._connection, b".")

    def wait(self, timeout: float | None = None) -> int:
        if self._connection < 0:
            return 0
        if not select.select([self._connection], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(_MODULE, timeout or 0.0)
        os.close(self._connection)
        self._connection = -1
        return 0


class _Ancestor:
    def __init__(self, environment: Mapping[str, str], log: Path) -> None:
        self.packages = _packages(os.environ)
        self.connection, theirs = socket.socketpair()
        with theirs, log.open("ab") as output:
            self._process = subprocess.Popen(
                [*RUN_MODULE, _MODULE, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
            self._process.returncode = 0  # nobody waits for it: it ends when the last that can ask it does
        atexit.register(self.connection.close)

    @property
    def ended(self) -> bool:
        """It says nothing on its own."""
        return bool(select.select([self.connection], [], [], 0)[0])


def _packages(environment: Mapping[str, str]) -> str | None:
    """What decides which others' packages are imported."""
    return environment.get("PYTHONPATH")


def may_fork(source: Source) -> bool:
    """Whether this SGLang imports others' packages as an ancestor does: it comes with none of its own, as releases do that pin
    another transformers."""
    paths = [str(path) for path in source.paths if str(path) not in sys.path]
    own = {module.name for module in pkgutil.iter_modules(paths)} - {"sglang"}
    return not own and (_standing is None or _standing.ended or _standing.packages == _packages(os.environ))


def fork(environment: Mapping[str, str], words: list[str], connection: socket.socket, log: Path) -> Leash:
    """A zygote in this environment, with these arguments, which answers at this connection and prints into this file; of
    an SGLang for which may_fork holds.

    Returns at once. What the ancestor imports itself does not depend on the environment of one zygote."""
    global _standing
    if _standing is not None and _standing.ended:
        _standing.connection.close()
        _standing = None
    if _standing is None:
        _standing = _Ancestor(environment, log)
    ours, theirs = socket.socketpair()
    asked = protocol.Import(dict(environment), words, os.getcwd(), str(log))
    with theirs, contextlib.suppress(OSError):  # it has just ended: what waits for the zygote finds it gone
        protocol.send(_standing.connection, asked, connection.fileno(), theirs.fileno())
    return Leash(ours)
