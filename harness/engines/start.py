"""Starts the process that imports an engine. Imports nothing slow itself, so that both processes can import at once.

The command line starts a zygote first of all, then imports torch and the judge, then reads the case. host.py waits for
the zygote, and speaks with it.
"""

import atexit
import contextlib
import os
import pkgutil
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import msgspec

from eagletwin.harness.core.differs import Watch
from eagletwin.harness.core.files import RUN_MODULE, cache_folder
from eagletwin.harness.core.run_spec import CPU, Device, Engine, Mode

from . import protocol
from .source import INSTALLED, Source

# The caller's side of the process from which zygotes are forked: it has imported torch and what else every SGLang imports.

_MODULE = "eagletwin.harness.engines.sglang.processes.ancestor"

_standing: "_Ancestor | None" = None
_edited: "_Ancestor | None" = None  # the one that has imported a tree that is edited


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
    """root: the folder of the tree that it has imported; None: it imports no SGLang"""

    def __init__(self, process: "subprocess.Popen[bytes] | Leash", connection: socket.socket, root: Path | None = None) -> None:
        self.process, self.connection, self.root = process, connection, root
        self.packages = _packages(os.environ)
        atexit.register(connection.close)

    @property
    def ended(self) -> bool:
        """It says nothing on its own."""
        return bool(select.select([self.connection], [], [], 0)[0])

    def fork(self, asked: protocol.Import, connection: socket.socket) -> Leash:
        ours, theirs = socket.socketpair()
        with theirs, contextlib.suppress(OSError):  # it has just ended: what waits for the zygote finds it gone
            protocol.send(self.connection, asked, connection.fileno(), theirs.fileno())
        return Leash(ours)


def _start_ancestor(environment: Mapping[str, str], log: Path) -> _Ancestor:
    ours, theirs = socket.socketpair()
    with theirs, log.open("ab") as output:
        process = subprocess.Popen(
            [*RUN_MODULE, _MODULE, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        process.returncode = 0  # nobody waits for it: it ends when the last that can ask it does
    return _Ancestor(process, ours)


def _packages(environment: Mapping[str, str]) -> str | None:
    """What decides which others' packages are imported."""
    return environment.get("PYTHONPATH")


def may_fork(source: Source) -> bool:
    """Whether this SGLang imports others' packages as an ancestor does: it comes with none of its own, as releases do that pin
    another transformers."""
    paths = [str(path) for path in source.paths if str(path) not in sys.path]
    own = {module.name for module in pkgutil.iter_modules(paths)} - {"sglang"}
    return not own and (_standing is None or _standing.ended or _standing.packages == _packages(os.environ))


def fork(environment: Mapping[str, str], words: list[str], connection: socket.socket, log: Path, tree: Path | None) -> Leash:
    """A zygote in this environment, with these arguments, which answers at this connection and prints into this file; of
    an SGLang for which may_fork holds.

    tree: it follows the edits of the tree in this folder, which is imported once. Returns at once. What the ancestor imports
    itself does not depend on the environment of one zygote."""
    global _standing, _edited
    if _standing is not None and _standing.ended:
        _standing.connection.close()
        _standing = None
    if _standing is None:
        _standing = _start_ancestor(environment, log)
    ancestor, asked = _standing, protocol.Import(dict(environment), words, os.getcwd(), str(log))
    if tree is not None:
        if not follows(tree):
            import_again()
            ours, theirs = socket.socketpair()
            with theirs:
                _edited = _Ancestor(_standing.fork(msgspec.structs.replace(asked, stays=True), theirs), ours, tree)
        assert _edited is not None
        ancestor = _edited
    return ancestor.fork(asked, connection)


def follows(tree: Path) -> bool:
    """Whether a process stands that has imported the tree in this folder."""
    return _edited is not None and not _edited.ended and _edited.root == tree


def import_again() -> None:
    """What has imported an edited tree is of no more use: an edit changed more than it can follow."""
    global _edited
    if _edited is not None:
        _edited.process.kill()
        _edited.process.wait()
        _edited.connection.close()
        _edited = None


class Zygote:
    """A process that imports SGLang; `ready` once it has said that it is done, and which `version` it has. Use as a context
    manager, or close it.

    watch  what its engines look for; as a rule what was changed in the source
    edited  the source is a tree that is searched again after each edit: the process that imports it stays for the next zygote
    """

    def __init__(
        self, source: Source = INSTALLED, mode: Mode = CPU, *, watch: Watch | None = None, edited: bool = False
    ) -> None:
        self.ready, self.version, self.edited = False, "", edited
        self.follows = False  # an edit of what was imported for an earlier zygote
        self._watch = source.difference.watch if watch is None and source.difference is not None else watch
        self.source, self.mode = source, mode
        self.connection, self._theirs = socket.socketpair()
        self._process: subprocess.Popen[bytes] | Leash | None = None
        self._log: Path | None = None
        self._scratch = ""  # TMPDIR of the engine processes: SGLang leaves files in it at each start

    @classmethod
    def joined(cls, descriptor: int, source: Source, mode: Mode) -> "Zygote":
        """One that another process started, at the other end of what it was `shared` at. Closing it lets go of it."""
        zygote = cls(source, mode)
        zygote.connection.close()
        zygote._theirs.close()
        zygote.connection = socket.socket(fileno=descriptor)
        return zygote

    def __enter__(self) -> "Zygote":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def shared(self) -> socket.socket:
        """A connection at which another process finds this one, `joined`."""
        ours, theirs = socket.socketpair()
        with theirs, contextlib.suppress(OSError):  # it has just ended: whoever joins it finds it gone
            protocol.send(self.connection, protocol.Join(), theirs.fileno())
        return ours

    def start(self) -> None:
        """Start the process, and return at once. What interrupts this leaves nothing that close() does not remove."""
        self._scratch = tempfile.mkdtemp(prefix="eagletwin-")
        handle, log_name = tempfile.mkstemp(prefix="zygote-", suffix=".log", dir=cache_folder("logs"))
        self._log = Path(log_name)
        environment = _environment(self.source, self.mode) | {"TMPDIR": self._scratch}
        with self._theirs, os.fdopen(handle, "wb") as log:
            if self.program == _program("sglang", "cpu") and may_fork(self.source):
                tree = self.source.root if self.edited else None
                self.follows = tree is not None and follows(tree)
                self._process = fork(environment, self._source_arguments(), self._theirs, self._log, tree)
                return
            self._process = subprocess.Popen(
                [*self.program, str(self._theirs.fileno()), *self._source_arguments()],
                pass_fds=[self._theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def start_again(self) -> None:
        """Import the edited tree, which the process that stays could not follow; in a process of its own, if that one had just
        imported it."""
        self.close()
        self.edited = self.follows
        import_again()
        self.connection, self._theirs = socket.socketpair()
        self.start()

    def _source_arguments(self) -> list[str]:
        """What the process must know of the SGLang that it is to import: what to call it, where it must lie, and a file that
        names what is watched in it."""
        words = [self.source.called, str(self.source.root)] if self.source.paths or self._watch is not None else []
        if self._watch is not None:
            changes = Path(self._scratch, "changes.json")
            changes.write_bytes(msgspec.json.encode(self._watch))
            words.append(str(changes))
        return words

    @property
    def program(self) -> list[str]:
        """The command line of the process, without its arguments: FD [VERSION ROOT [CHANGES]]."""
        return _program(self.mode.engine, self.mode.device)

    @property
    def scratch(self) -> Path:
        """A folder for what ends with this process."""
        return Path(self._scratch)

    @property
    def ended(self) -> bool:
        if self._process is None:  # joined: once it is ready it says nothing on its own
            return self.ready and bool(select.select([self.connection], [], [], 0)[0])
        return self._process.poll() is not None

    def kill(self) -> None:
        """End the process, which ends all its forks."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def keep_log(self) -> Path | None:
        """The file with the process's output, which now outlives it; None: another process has it. A zygote that came up says
        nothing that a run folder does not."""
        log, self._log = self._log, None
        return log

    def close(self) -> None:
        """End the process and remove what it left. Closing again does nothing."""
        self._theirs.close()
        self.connection.close()
        self.kill()
        if self._log is not None:
            self._log.unlink(missing_ok=True)
            self._log = None
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = ""


# What answers the caller, by engine and device. A process that has used a GPU cannot be forked.
_MODULES: dict[tuple[Engine, Device], str] = {
    ("sglang", "cpu"): "eagletwin.harness.engines.sglang.processes.zygote",
    ("sglang", "cuda"): "eagletwin.harness.engines.sglang.processes.cuda_host",
    ("vllm", "cpu"): "eagletwin.harness.engines.vllm.zygote",
}


def _program(engine: Engine, device: Device) -> list[str]:
    return [*RUN_MODULE, _MODULES[engine, device]]


# What an engine reads while it is imported.
_OF_ENGINE: dict[Engine, dict[str, str]] = {
    "sglang": {"SGLANG_EXTERNAL_MODEL_PACKAGE": "eagletwin.harness.engines.sglang.boot.served"},
    "vllm": {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_PLUGINS": "",
        "VLLM_CPU_CI_ENV": "1",  # no forward that only warms up
        "DO_NOT_TRACK": "1",
    },
}


def _environment(source: Source, mode: Mode) -> dict[str, str]:
    """The environment of the engine processes: the caller's, with this engine, and what it reads while it is imported.

    The caller's own settings of the engines and Triton stay outside: they would change the engine, and no trace would say so.
    """
    of_engines = ("SGLANG_", "SGL_", "VLLM_", "TRITON_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(of_engines)}
    # an engine is some 2,000 modules: without bytecode each start costs 3 s more. The prefix also serves a read-only install.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    paths = [*map(str, source.paths), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    environment |= {
        "PYTHONPYCACHEPREFIX": str(cache_folder("bytecode")),
        "PYTHONHASHSEED": "0",  # no order of a set may reach a trace
        "TORCHDYNAMO_DISABLE": "1",  # the first decode step would compile for 11 s
        "TORCH_COMPILE_DISABLE": "1",
        "OMP_NUM_THREADS": "1",  # with two, a forked child deadlocks in the thread pool of its parent
        "MKL_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        **_OF_ENGINE[mode.engine],
    }
    if mode.device == "cpu":
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        environment |= {"SGLANG_USE_CPU_ENGINE": "1"} if mode.engine == "sglang" else {}
        # Asked for a GPU, torch starts CUDA's driver, and with some drivers its forks end. So it asks NVML.
        environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        return environment
    environment |= {"TRITON_CACHE_DIR": str(cache_folder("triton")), "SGLANG_ENABLE_JIT_DEEPGEMM": "0"}
    if mode.dtype == "float32":
        environment |= {"TRITON_F32_DEFAULT": "ieee"}  # else Triton rounds factors of float32 products to TF32
    return environment | ({"CUDA_VISIBLE_DEVICES": str(mode.gpu)} if mode.gpu >= 0 else {})
