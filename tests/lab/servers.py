"""The caller's side of SGLang's own HTTP server on a CPU: start servers, wait for them, outlive them.

SGLang and its front end are imported once; each server is forked from that process. Closing a server ends all its processes.
"""

import contextlib
import os
import select
import socket
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from msgspec.structs import replace

from eagletwin.harness.core.errors import InputError
from eagletwin.harness.engines import protocol
from eagletwin.harness.engines.host import BUILD_SECONDS, Host, PatchDoesNotApply, WouldNotStart
from eagletwin.harness.engines.start import Zygote

from .serving import messages
from .serving.zygote import FrontEnd

# From the scheduler that stands to the first answer takes tenths of a second; this only ends what will never answer.
ANSWER_SECONDS = 120.0
# Below those of ranks (rank_group.py) and those that Linux gives to connections; releases take one 10,000 higher, too.
_PORTS = range(15000, 20000)
# How long a supervisor may take to end a server, which it does by force.
_END_SECONDS = 30.0


class Servers:
    """A process with SGLang and its HTTP front end imported, and the servers that are forked from it. A context manager.

    zygote: a FrontEnd that was started; None: one of the installed SGLang"""

    def __init__(self, zygote: Zygote | None = None) -> None:
        self._zygote = FrontEnd() if zygote is None else zygote
        if zygote is None:
            self._zygote.start()
        self._host = Host(self._zygote)
        self._running: list[Server] = []

    def __enter__(self) -> "Servers":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        for server in self._running:
            server.close()
        self._host.close()

    def start(self, asked: messages.Serve) -> "Server":
        """Start a server; it answers when this returns. Port 0: a free one. Its `log` is set here.

        Raises WouldNotStart, PatchDoesNotApply, and InputError for a port that is taken."""
        connection = self._host.connection()
        handle, log = tempfile.mkstemp(prefix="server-", suffix=".log", dir=self._zygote.scratch)
        os.close(handle)
        with _reserve_port(asked.port) as port:
            ours, theirs = socket.socketpair()
            with theirs:
                protocol.send(connection, replace(asked, port=port, log=log), theirs.fileno())
            server = Server(ours, f"http://127.0.0.1:{port}", Path(log))
            self._running.append(server)
            server.wait()
        return server


class Server:
    """A server, from the moment at which it is asked for. shims: what is not as in SGLang, once it stands.

    url  http://127.0.0.1:PORT; log: the file with all that its processes print, which lasts as long as its Servers
    """

    def __init__(self, connection: socket.socket, url: str, log: Path) -> None:
        self.url, self.log = url, log
        self.shims: tuple[str, ...] = ()
        self._connection = connection
        self._error: str | None = None

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def ended(self, seconds: float = 0.0) -> str | None:
        """What ended it, waiting up to so many seconds for that; None: it runs."""
        until = time.monotonic() + seconds
        while self._error is None and select.select([self._connection], [], [], max(0.0, until - time.monotonic()))[0]:
            self._hear()
        return self._error

    def wait(self) -> None:
        """Return when it answers. Raises WouldNotStart and PatchDoesNotApply, and then nothing of it is left."""
        try:
            self._stand()
            until = time.monotonic() + ANSWER_SECONDS
            while not self._answers():
                if self.ended(0.05) is not None or time.monotonic() > until:
                    raise self._would_not_start(self._error or f"it did not answer within {ANSWER_SECONDS:g} s")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all its processes, and return when none is left. Closing again does nothing."""
        if self._connection.fileno() < 0:
            return
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
        self.ended(_END_SECONDS)
        self._connection.close()

    def _stand(self) -> None:
        """Wait until the scheduler stands."""
        self._connection.settimeout(BUILD_SECONDS)
        try:
            answer, _ = protocol.receive(self._connection, messages.Said)
        except (EOFError, TimeoutError, ConnectionError) as error:
            raise self._would_not_start(f"its processes fell silent ({type(error).__name__})") from error
        finally:
            self._connection.settimeout(None)
        if isinstance(answer, protocol.PatchDidNotApply):
            raise PatchDoesNotApply(
                answer.error,
                consequence="the patched server was not started",
                remedy="adapt the patch to this release of SGLang",
            )
        if isinstance(answer, protocol.Refused | messages.ServerEnded):
            raise self._would_not_start(answer.error, ours=isinstance(answer, protocol.Refused) and answer.ours)
        if not isinstance(answer, messages.Serving):
            raise protocol.unexpected_message(answer)
        self.shims = answer.shims

    def _hear(self) -> None:
        """Take what the supervisor says of a server that stands: that it ended, or first what one of its processes said."""
        try:
            message, _ = protocol.receive(self._connection, messages.Said)
        except (EOFError, ConnectionError):
            self._error = "its supervisor is gone"
            return
        if isinstance(message, messages.ServerEnded):
            self._error = message.error

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def _would_not_start(self, cause: str, *, ours: bool = False) -> WouldNotStart:
        last = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()][-1:]
        said = f"; its last line: {last[0]}" if last and last[0] not in cause else ""
        error = WouldNotStart(
            f"{'eagletwin' if ours else 'SGLang'} does not serve this: {cause}{said}",
            consequence="no server runs",
            remedy="ask for another configuration, or another release",
        )
        error.log = self.log
        return error


@contextlib.contextmanager
def _reserve_port(port: int) -> Iterator[int]:
    """Hold a port, 0: a free one, until the server listens at it: others do not get it, and whoever asks to reuse it does."""
    first = os.getpid() * 7  # servers that start at once try different ones
    tried = [port] if port else [_PORTS[(first + n) % len(_PORTS)] for n in range(len(_PORTS))]
    with socket.socket() as held:
        for number in tried:
            with contextlib.suppress(OSError):
                held.bind(("127.0.0.1", number))
                break
        else:
            raise InputError(
                f"port {port} is taken, or not to be had" if port else f"no port from {_PORTS[0]} to {_PORTS[-1]} is free",
                consequence="no server was started",
                remedy="name another port, or none: a free one is taken" if port else "name one that is free",
            )
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        yield held.getsockname()[1]
