"""SGLang's HTTP front end on a CPU: what of it is imported, what stands in, and what a server needs before its launch.

A server is SGLang's own: its launcher, its processes, its event loop. Called by front.py and server.py.
"""

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from eagletwin.harness.core.terminal import describe_exit
from eagletwin.harness.engines.inside.blame import NotDriven
from eagletwin.harness.engines.sglang.compat import attention, verify, workers
from eagletwin.harness.engines.sglang.stand_ins import stubs

from .messages import Serve

# Packages that the front end imports for tool calls and speech, and that a host may lack. One that is there is used.
SPARE = ("jsonschema", "soundfile")
# Of what an engine leaves out, the front end's own.
_WANTED = (
    "aiohttp",
    "fastapi",
    "sglang.srt.entrypoints.openai.protocol",
    "sglang.srt.entrypoints.v1_loads",
    "uvicorn",
)


def idle() -> tuple[str, ...]:
    """Modules that a server never calls."""
    return tuple(name for name in stubs.IDLE if name not in _WANTED)


def import_it() -> None:
    """Import all that the processes of a server do."""
    os.environ["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "0"  # /health answers at once, and makes no request of its own
    for name in ("sglang.launch_server", "sglang.srt.entrypoints.http_server", "sglang.srt.managers.detokenizer_manager"):
        importlib.import_module(name)


def make_able(asked: Serve, folder: str, shims: list[str]) -> None:
    """What a server needs on a CPU, in its first process, before it forks the others. folder: takes all its files."""
    verify.choose(shims)
    if asked.mode.overlap:
        workers.allow_overlap(shims)
    attention.use_triton(shims)
    try:
        verify.open_gate(shims)
    except NotDriven as error:
        shims.append(f"requests that sample are verified greedily: {error}")
    _fork(shims)
    _keep_loads_in(folder, shims)


def end_at_once(tell: Callable[[str], None], shims: list[str]) -> None:
    """When one of its processes dies, SGLang dumps the stacks of the others, for minutes, and then ends them: here at once.

    tell: is told what is known of the one that died"""

    def fail(error: str) -> NoReturn:
        tell(error)
        os._exit(1)

    def check(self: Any) -> bool:
        both = zip(self._names, self._processes, strict=True)
        dead = [(name, process.exitcode) for name, process in both if not process.is_alive() and process.exitcode != 0]
        if dead:
            fail(", ".join(f"{name} {describe_exit(code)}" for name, code in dead))
        return False

    instead: dict[str, Callable[..., Any]] = {
        "sglang.srt.utils.watchdog.SubprocessWatchdog._check_processes": check,
        "sglang.srt.managers.tokenizer_manager.SignalHandler.running_phase_sigquit_handler": lambda *_: fail(
            "one of its processes failed, and said so"
        ),
    }
    for path, function in instead.items():
        module, of, name = path.rsplit(".", 2)
        kind = getattr(sys.modules.get(module), of, None)
        if hasattr(kind, name):
            setattr(kind, name, function)
            shims.append(f"{of}.{name}: ends the server at once, without a dump")


def launch(words: list[str]) -> None:
    """Run SGLang's launch_server with these arguments until it ends. Raises NotDriven, and what SGLang raises."""
    server_arguments: Any = importlib.import_module("sglang.srt.server_args")
    launcher: Any = importlib.import_module("sglang.launch_server")
    with contextlib.suppress(ModuleNotFoundError):  # up to 0.5.9 there are none
        importlib.import_module("sglang.srt.plugins").load_plugins()
    arguments = server_arguments.prepare_server_args(words)
    if arguments.tp_size > 1:
        raise NotDriven(f"a server of {arguments.tp_size} ranks: on a CPU it has one")
    launcher.run_server(arguments)


def _fork(shims: list[str]) -> None:
    """SGLang spawns its processes, and each imports all of SGLang anew. Here they are forks, of a process without threads."""
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *_, **__: None
    # the launcher's answer to the failure of a child; a child has SGLang's own, or none
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGQUIT, signal.SIG_DFL))
    shims.append("multiprocessing.set_start_method: does nothing; the server's processes are forked, not spawned")


def _keep_loads_in(folder: str, shims: list[str]) -> None:
    """The scheduler shows its load in a file of /dev/shm, which would outlive a server that is killed."""
    loads: Any = sys.modules.get("sglang.srt.managers.load_snapshot")
    if hasattr(loads, "shm_path_for"):
        loads.shm_path_for = lambda _name: str(Path(folder, "loads"))
        shims.append("load_snapshot.shm_path_for: a file of the server's own folder")
