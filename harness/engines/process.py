"""The caller's side of the engine processes: start them, run cases on them, outlive them.

A Host is one zygote (SGLang imported once). An EngineProcess is one configuration, forked from it. Neither can take the
caller down: whatever happens to them ends in a trace whose ending says so, or in an error that says what to do.
"""

import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from eagletwin.harness.case import Case, encode_case
from eagletwin.harness.errors import EagletwinError, HarnessError
from eagletwin.harness.patch import Patch
from eagletwin.harness.paths import cache_folder
from eagletwin.harness.trace import Ending, EngineInfo, Trace, new_header, read_trace, write_trace

from . import wire

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
    """A process with SGLang imported, from which engines are forked. Use as a context manager."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._engines: dict[bytes, EngineProcess] = {}
        self._scratch: Path | None = None  # TMPDIR of the engine processes: SGLang leaves files in it at each start
        self.version = ""

    def __enter__(self) -> "Host":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            if self.version:  # it came up: its log says nothing that a run folder does not
                _log_file().unlink(missing_ok=True)
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    def engine(self, case: Case, patches: tuple[Patch, ...] = (), kernels: wire.Kernels = "fast") -> "EngineProcess":
        """The engine for this case's configuration, built first if need be. Raises WouldNotStart, HarnessError."""
        configuration = case.configuration()
        key = encode_case(configuration) + repr((patches, kernels)).encode()
        if self._process is not None and self._process.poll() is not None:
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
        if self._connection is not None and self._process is not None and self._process.poll() is None:
            return self._connection
        self.close()
        self._scratch = Path(tempfile.mkdtemp(prefix="eagletwin-"))
        ours, theirs = socket.socketpair()
        with theirs, _log_file().open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "eagletwin.harness.engines.sglang.zygote", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=_environment() | {"TMPDIR": str(self._scratch)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        ours.settimeout(IMPORT_SECONDS)
        try:
            answer, _ = wire.receive(ours)
        except (EOFError, TimeoutError, ConnectionError) as error:
            raise self._no_import(f"the process that imports it ended or fell silent ({type(error).__name__})") from error
        if isinstance(answer, wire.Refused):
            raise self._no_import(answer.error)
        assert isinstance(answer, wire.Ready)
        self.version, self._connection = answer.version, ours
        ours.settimeout(None)
        return ours

    def _no_import(self, cause: str) -> WouldNotStart:
        return WouldNotStart(
            f"SGLang cannot be imported: {cause}",
            consequence="no case was run",
            remedy=f"`eagletwin doctor`; the whole message is in {_log_file()}",
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


def _log_file() -> Path:
    return cache_folder("logs") / f"zygote-{os.getpid()}.log"


def _environment() -> dict[str, str]:
    """The environment of the engine processes: the caller's, with what SGLang reads while it is imported.

    The caller's own settings of SGLang and Triton stay outside: they would change the engine, and no trace would say so.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SGLANG_", "SGL_", "TRITON_"))}
    # SGLang is some 2,000 modules: without bytecode each start costs 3 s more. The prefix also serves a read-only install.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment | {
        "PYTHONPYCACHEPREFIX": str(cache_folder("bytecode")),
        "PYTHONHASHSEED": "0",  # no order of a set may reach a trace
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "eagletwin.harness.engines.sglang.served",
        "TRITON_INTERPRET": "1",
        "TORCHDYNAMO_DISABLE": "1",  # the first decode step would compile for 11 s
        "TORCH_COMPILE_DISABLE": "1",
        "OMP_NUM_THREADS": "1",  # with two, a forked child deadlocks in the thread pool of its parent
        "MKL_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
