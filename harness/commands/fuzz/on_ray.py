"""Workers on Ray: one actor each, which may die at any time. The only file that knows Ray.

An actor that dies is replaced by another one, on whatever machine has room. Its answers come as a stream, one after each case,
so that no more than the case that it was running is lost. It waits where nobody reads them.
"""

import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from eagletwin.harness.core.errors import HarnessError, InputError

from .options import SearchOptions
from .pool import AHEAD, WORKER_BYTES
from .worker import Terms, Worker, written

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_UNREAD = 2  # answers that an actor may have given and nobody read; then it waits
_MANY = 16  # workers for which blocks may be run ahead, since a cluster may grow


class Actor:
    """A worker that is an actor."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray, self._actor = ray, actor

    def wait(self) -> None:
        self._ray.get(self._actor.up.remote())

    def run(self, job: bytes) -> Iterator[bytes]:
        streaming = {"num_returns": "streaming", "_generator_backpressure_num_objects": _UNREAD}
        for answer in self._actor.run.options(**streaming).remote(job):
            yield self._ray.get(answer)

    def kill(self) -> None:
        with suppress(Exception):  # it is gone, or out of reach
            self._ray.kill(self._actor)

    close = kill

    def how_it_ended(self, error: Exception) -> str:
        return f"ended ({' '.join(_COLOURS.sub('', str(error)).split())})"


class Actors:
    """Workers on a cluster. Use as a context manager.

    processes of the options: how many workers; 0: as many as the cluster has room for, at any time
    """

    def __init__(self, options: SearchOptions, kind: type = Worker) -> None:
        self._ray, self._kind = _load_ray(), kind
        self._address, self._number, self._terms = options.address, options.processes, written(Terms(options))
        mode = options.run.mode
        self._gpus = mode.tp if mode.device == "cuda" else 0
        self.ahead = AHEAD * max(self._number, _MANY)

    def __enter__(self) -> "Actors":
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self._ray.init(address=self._address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, ValueError, RuntimeError, OSError) as error:
            raise InputError(
                f"there is no Ray cluster at {self._address}: {error}",
                consequence="nothing was run",
                remedy="`ray start --head` on one machine and `ray start --address …` on the others, or leave --address out",
            ) from error
        finally:
            for number, handler in handlers.items():  # Ray sets its own, which end the process without a word
                signal.signal(number, handler)
        self._remote = self._ray.remote(self._kind)
        return self

    def __exit__(self, *_: object) -> None:
        self._ray.shutdown()

    def number(self) -> int:
        """A worker takes a core, and memory, and its GPUs."""
        if self._number:
            return self._number
        has = self._ray.cluster_resources()
        room = min(has.get("CPU", 0), has.get("memory", 0) // WORKER_BYTES)
        return max(1, int(min(room, has.get("GPU", 0) // self._gpus) if self._gpus else room))

    def start(self) -> Actor:
        options = {"num_cpus": 1, "num_gpus": self._gpus, "max_restarts": 0, "max_task_retries": 0}
        return Actor(self._ray, self._remote.options(**options).remote(self._terms))


def _load_ray() -> Any:
    """The module. Raises HarnessError where it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise HarnessError(
            "Ray is not installed",
            consequence="nothing was run: --address is of a Ray cluster",
            remedy="`pip install 'eagletwin[ray]'`, or leave --address out to use the cores of this machine",
        ) from error
    return ray
