"""Workers on Ray: one actor each, which may die at any time. The only file that knows Ray.

An actor that dies is replaced by another one, on whatever machine has room. Its answers come as a stream, one after each case,
so that no more than the case that it was running is lost. It waits where the driver does not read them.
"""

import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from eagletwin.harness.core.errors import HarnessError, InputError

from .books import UNREAD
from .drive import Heard
from .worker import Worker

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_WAIT = 0.5  # seconds to wait for an answer
_PATIENCE = 10.0  # seconds in which idle workers close their engines
_STILLBORN = 5  # actors that may end one after the other before they are up, with none up
_WORKER_BYTES = 1_500_000_000  # of memory that one worker takes with its engines


class OnRay:
    """A crew of Ray actors. Use as a context manager.

    address  of a cluster; "": one that is started on this machine, and ends with it
    workers  how many; 0: as many as the cluster has room for, at any time
    gpus     that each takes, a part of one or several; 0: it runs on a CPU
    """

    def __init__(self, terms: bytes, address: str, workers: int, gpus: float, kind: type = Worker) -> None:
        self._terms, self._address, self._workers, self._gpus, self._kind = terms, address, workers, gpus, kind
        self._actors: dict[int, Any] = {}
        self._awaited: dict[Any, int] = {}  # a stream of answers, or the first sign of life
        self._up: set[int] = set()
        self._next, self._stillborn = 0, 0

    def __enter__(self) -> "OnRay":
        self._ray = ray = load_ray()
        asked = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        own: dict[str, Any] = {"include_dashboard": False, **({"num_cpus": self._workers} if self._workers else {})}
        try:
            ray.init(
                address=self._address or "local",
                log_to_driver=False,
                logging_level="ERROR",
                **({} if self._address else own),
            )
        except (ConnectionError, ValueError, RuntimeError, OSError) as error:
            raise InputError(
                f"there is no Ray cluster at {self._address or 'this machine'}: {error}",
                consequence="nothing was run",
                remedy="`ray start --head` on one machine and `ray start --address …` on the others, or leave --address out",
            ) from error
        finally:
            for number, handler in asked.items():  # Ray sets its own, which end the process without a word
                signal.signal(number, handler)
        self._actor = ray.remote(self._kind)
        self._grow()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(Exception):  # those that run a case are ended
            closing = [self._actors[worker].close.remote() for worker in self.idle()]
            self._ray.wait(closing, num_returns=len(closing), timeout=_PATIENCE)
        for actor in self._actors.values():
            with suppress(Exception):
                self._ray.kill(actor)
        self._ray.shutdown()

    @property
    def size(self) -> int:
        return len(self._actors)

    def idle(self) -> list[int]:
        busy = set(self._awaited.values())
        return [worker for worker in self._up if worker not in busy]

    def start(self, worker: int, job: bytes) -> None:
        streaming = {"num_returns": "streaming", "_generator_backpressure_num_objects": UNREAD}
        stream = self._actors[worker].run.options(**streaming).remote(job)
        self._awaited[stream] = worker

    def heard(self) -> Iterator[Heard]:
        self._grow()
        ready, _ = self._ray.wait(list(self._awaited), num_returns=1, timeout=_WAIT)
        while ready:
            yield self._of(ready[0])
            if not self._awaited:
                return
            ready, _ = self._ray.wait(list(self._awaited), num_returns=1, timeout=0)

    def _of(self, ready: Any) -> Heard:
        worker = self._awaited[ready]
        try:
            if worker not in self._up:
                answer: bytes = self._ray.get(ready)
                del self._awaited[ready]
                self._up.add(worker)
                self._stillborn = 0
                return worker, answer
            return worker, self._ray.get(next(ready))
        except StopIteration:
            del self._awaited[ready]
            return worker, None
        except self._ray.exceptions.RayError as error:
            del self._awaited[ready]
            return worker, self._bury(worker, error)

    def _bury(self, worker: int, error: Exception) -> str:
        """A worker ended: forget it. Raises HarnessError if none gets up any more."""
        with suppress(Exception):  # what is only out of reach would go on
            self._ray.kill(self._actors[worker])
        del self._actors[worker]
        why = " ".join(_COLOURS.sub("", str(error)).split())
        if worker in self._up:
            self._up.remove(worker)
            return why
        self._stillborn += 1
        if self._stillborn >= _STILLBORN and not self._up:
            raise HarnessError(
                f"no worker gets up: {why}",
                consequence="the campaign ended there; what it saw is kept",
                remedy="see that eagletwin and SGLang are installed on each machine of the cluster, then go on with --resume",
            )
        return why

    def _grow(self) -> None:
        """Have as many actors as are wanted, or as there is room for."""
        wanted = self._workers or self._room()
        while len(self._actors) < wanted:
            worker, self._next = self._next, self._next + 1
            actor = self._actor.options(num_cpus=1, num_gpus=self._gpus, max_restarts=0, max_task_retries=0)
            self._actors[worker] = actor.remote(self._terms)
            self._awaited[self._actors[worker].up.remote()] = worker

    def _room(self) -> int:
        """How many workers the cluster has room for: a core each, and memory, and their part of a GPU."""
        has = self._ray.cluster_resources()
        room = min(has.get("CPU", 0), has.get("memory", 0) // _WORKER_BYTES)
        return max(1, int(min(room, has.get("GPU", 0) / self._gpus) if self._gpus else room))


def load_ray() -> Any:
    """The module. Raises HarnessError where it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise HarnessError(
            "Ray is not installed",
            consequence="nothing was run: a campaign's workers are actors of Ray",
            remedy="`pip install 'eagletwin[campaign]'`; or `eagletwin fuzz`, which uses the cores of one machine without it",
        ) from error
    return ray
