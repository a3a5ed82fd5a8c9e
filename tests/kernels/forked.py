"""The process of `eagletwin kernels` as a fork of one that has imported what SGLang imports of others.

That costs a process of its own five seconds of a core, and SGLang itself one or two."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO

from eagletwin.harness.core.files import RUN_MODULE
from eagletwin.harness.core.run_spec import CPU
from eagletwin.harness.engines.source import INSTALLED
from eagletwin.harness.engines.start import _environment

from ..harness.imported import Imported

_OTHERS = (
    *("torch", "hypothesis", "msgspec", "transformers.models.auto", "transformers.processing_utils", "triton.language"),
    *("torch.distributed", "torch.multiprocessing", "torch.profiler", "PIL.Image", "einops", "orjson", "pybase64", "pydantic"),
    *("requests", "sentencepiece", "tiktoken", "zmq.asyncio"),
)
_server = Imported(*_OTHERS, environment=_environment(INSTALLED, CPU))

# What Python does with these variables when it starts.
_AS_STARTED = """
import importlib, os, runpy, sys
sys.path[:0] = [path for path in os.environ["PYTHONPATH"].split(os.pathsep) if path]
sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"]
importlib.invalidate_caches()
sys.argv = {words!r}
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


class Forked:
    """As subprocess.Popen, of a module of eagletwin's."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        pass_fds: Sequence[int],
        env: Mapping[str, str],
        stdin: int,
        stdout: IO[bytes],
        stderr: IO[bytes],
    ) -> None:
        assert (tuple(command[: len(RUN_MODULE)]), stdin) == (RUN_MODULE, subprocess.DEVNULL)
        program = _AS_STARTED.format(words=[*command[len(RUN_MODULE) :]])
        streams = (stdout.fileno(), stderr.fileno())
        self._process = _server.start(["-c", program], os.getcwd(), env, *streams, handed=pass_fds)
        self._code: int | None = None

    def kill(self) -> None:
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self._process, signal.SIGKILL)

    def wait(self) -> int:
        if self._code is None:
            self._code = _server.ended()
        return self._code
