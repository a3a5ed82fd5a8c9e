"""The caller's side of the engine processes: start them, run cases on them, outlive them.

A Host is one zygote (SGLang imported once). An EngineProcess is one configuration, forked from it. Neither can take the
caller down: whatever happens to them ends in a trace whose ending says so, or in an error that says what to do.
"""

import select
import socket
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from eagletwin.harness.case import Case, encode_case
from eagletwin.harness.errors import EagletwinError, HarnessError
from eagletwin.harness.patch import Patch
from eagletwin.harness.trace import Ending, EngineInfo, Trace, new_header, read_trace, write_trace

from . import wire
from .start import Zygote

# Import and build take some 10 s on an idle machine; these limits only end what will never answer.
IMPORT_SECONDS = 300.0
BUILD_SECONDS = 300.0
# Engines that stay up at once. Each holds some 0.05 GB of its own, and 30 threads of SGLang's that wake up now and then;
# building one again takes under a second.
MAX_ENGINES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Seconds. A step is one stage of one scheduler iteration: under the interpreter some 0.1 to 1 s on an idle machine."""

    step: float = 120.0
    case: float = 900.0


class WouldNotStart(EagletwinError):
    """SGLang cannot be imported, or refuses the configuration. For a verdict: unknown."""


class Host:
    """A process with SGLang imported, from which engines are forked: `zygote`, which was started, or one of its own. Use as a
    context manager."""

    def __init__(self, zygote: Zygote | None = None) -> None:
        self._zygote = zygote
        self._engines: dict[bytes, EngineProcess] = {}
        self.version = ""

    def __enter__(self) -> "Host":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = None

    def engine(self, case: Case, patches: tuple[Patch, ...] = (), kernels: wire.Kernels = "fast") -> "EngineProcess":
        """The engine for this case's configuration, built first if need be. Raises WouldNotStart, HarnessError."""
        configuration = case.configuration()
        key = encode_case(configuration) + repr((patches, kernels)).encode()
        if self._zygote is not None and self._zygote.ready and self._zygote.ended:
            self.close()  # somebody killed the zygote, and its engines died with it
        engine = self._engines.get(key)
        if engine is None or not engine.alive:
            while len(self._engines) >= MAX_ENGINES:
                self._engines.pop(next(iter(self._engines))).close()
            engine = self._build(wire.Build(configuration, patches, kernels))
        self._engines.pop(key, None)
        self._engines[key] = engine  # last in the dict: used most recently
        return engine

    def _build(self, build: wire.Build) -> "EngineProcess":
        ours, theirs = socket.socketpair()
        with theirs:
            wire.send(self._started(), build, theirs.fileno())
        ours.settimeout(BUILD_SECONDS)
        try:
            answer, _ = wire.receive(ours)
        except (EOFError, TimeoutError, ConnectionError) as error:
            ours.close()
            raise WouldNotStart(
                f"the engine process died or fell silent while it was built ({type(error).__name__})",
                consequence="no case was run on this configuration",
                remedy="`eagletwin doctor`; free some memory, an engine takes about 0.7 GB",
            ) from error
        if isinstance(answer, wire.PatchDidNotApply):
            ours.close()
            raise HarnessError(
                answer.error,
                consequence="the patched engine was not built, so nothing is proven either way",
                remedy="adapt the patch to this release of SGLang",
            )
        if isinstance(answer, wire.Refused):
            ours.close()
            raise WouldNotStart(
                f"SGLang refused the configuration: {answer.error}",
                consequence="no case was run on this configuration",
                remedy="change the configuration; the release's own message is above",
            )
        assert isinstance(answer, wire.Built)
        return EngineProcess(ours, answer.engine)

    def _started(self) -> socket.socket:
        """The connection to a zygote that has imported SGLang."""
        if self._zygote is None:
            self._zygote = Zygote()
            self._zygote.start()
        connection = self._zygote.connection
        if not self._zygote.ready:
            connection.settimeout(IMPORT_SECONDS)
            try:
                answer, _ = wire.receive(connection)
            except (EOFError, TimeoutError, ConnectionError) as error:
                raise self._no_import(f"the process that imports it ended or fell silent ({type(error).__name__})") from error
            if isinstance(answer, wire.Refused):
                raise self._no_import(answer.error)
            assert isinstance(answer, wire.Ready)
            connection.settimeout(None)
            self._zygote.ready, self.version = True, answer.version
        return connection

    def _no_import(self, cause: str) -> WouldNotStart:
        assert self._zygote is not None
        log = self._zygote.keep_log()
        self.close()
        return WouldNotStart(
            f"SGLang cannot be imported: {cause}",
            consequence="no case was run",
            remedy=f"`eagletwin doctor`; the whole message is in {log}",
        )


class EngineProcess:
    """One configuration of the real worker. Each run is a fork of a process that never ran a case itself."""

    def __init__(self, connection: socket.socket, info: EngineInfo) -> None:
        self._connection = connection
        self.info = info
        self._open = True

    @property
    def alive(self) -> bool:
        """Whether the process is still there: it says nothing unless it is asked, so anything to read is its end."""
        if self._open and select.select([self._connection], [], [], 0)[0]:
            self.close()
        return self._open

    def close(self) -> None:
        self._open = False
        self._connection.close()

    def run(self, case: Case, folder: Path, limits: Limits = Limits()) -> Trace:
        """Run a case; its trace and the engine's log are in `folder`, which must be empty."""
        message = wire.Run(case, str(folder.absolute()), limits.step, limits.case)
        try:
            self._connection.settimeout(limits.case + 60)  # the engine process keeps the limits; this is for its own death
            wire.send(self._connection, message)
            answer, _ = wire.receive(self._connection)
        except (EOFError, OSError) as error:  # OSError: timed out, broken, or closed when the process was found gone
            self.close()
            ending = Ending(kind="crashed", detail=f"the engine process itself is gone ({type(error).__name__})")
            answer = wire.Ran(ending, False)
        if isinstance(answer, wire.Failed):
            raise HarnessError(
                f"the process of case {case.name} could not do its work: {answer.error}",
                consequence="the case has no trace and no verdict",
                remedy=f"look at {folder / 'engine.log'}, and at the free space and permissions of the folder",
            )
        assert isinstance(answer, wire.Ran)
        if not answer.written:
            write_trace(folder, new_header(case, self.info, answer.ending, ()), {})
        return read_trace(folder)
