"""Seeded pauses between the streams of a GPU, so that a wait that is missing shows. Called by drive.py.

Streams are ordered where one records an event and another waits for it, and begin new work where the process enters or leaves
a stream. After each such call, by chance, the stream on which work goes on sleeps for a while. The answers must not change: all
that has to wait is made to. SGLang's own test (`sglang/test/cache_consistency_jitter.py`) pauses after events, too.
"""

import random
from collections.abc import Callable
from typing import Any

import torch

from eagletwin.harness.core.records import Jitter, Jittered, Pause

_CYCLES = 2000  # of a microsecond: GPUs of today run at up to 2 GHz
_SPREAD = 100  # the shortest pause is this part of the longest


class Pauses:
    """From `start` to `stop` every event and every stream of the process gets them.

    cuda  torch.cuda, whose classes are changed
    name  what to call a stream
    """

    def __init__(self, asked: Jitter, name: Callable[[Any], str], cuda: Any = torch.cuda) -> None:
        self._asked, self._name, self._cuda = asked, name, cuda
        self._random = random.Random(asked.seed)
        self._points, self._pauses = 0, list[Pause]()
        self._inside = False  # a wait for a stream records an event and waits for it: one point, not three
        self._undo: list[tuple[Any, str, Any]] = []

    @property
    def jittered(self) -> Jittered:
        return Jittered(self._asked, self._points, tuple(self._pauses))

    def start(self) -> None:
        cuda = self._cuda
        for method in ("record", "wait"):
            self._wrap(cuda.Event, method, lambda event, stream=None: stream)
        for method in ("wait_event", "wait_stream"):
            self._wrap(cuda.Stream, method, lambda stream, other: stream)
        for method in ("__enter__", "__exit__"):  # work goes on in the stream that is then the current one
            self._wrap(cuda.StreamContext, method, lambda context, *_: None)

    def stop(self) -> None:
        while self._undo:
            setattr(*self._undo.pop())

    def _wrap(self, owner: Any, method: str, goes_on: Callable[..., Any]) -> None:
        """goes_on: of the call's arguments the stream behind it; None: the current one."""
        original = getattr(owner, method)
        place = f"{owner.__name__}.{method.strip('_')}"

        def with_pause(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return original(*args, **kwargs)
            self._inside = True
            try:
                result = original(*args, **kwargs)
                self._perhaps(place, goes_on(*args, **kwargs))
                return result
            finally:
                self._inside = False

        setattr(owner, method, with_pause)
        self._undo.append((owner, method, original))

    def _perhaps(self, place: str, stream: Any) -> None:
        """A point: draw whether the stream gets a pause, and which."""
        point, self._points = self._points, self._points + 1
        chance, part = self._random.random(), self._random.random()
        microseconds = int(self._asked.longest * _SPREAD ** (part - 1))
        if chance >= self._asked.share or not microseconds:
            return
        stream = self._cuda.current_stream() if stream is None else stream
        with self._cuda.StreamContext(stream):
            self._cuda._sleep(microseconds * _CYCLES)
        self._pauses.append(Pause(point, f"{place} on {self._name(stream)}", microseconds))


def streams_of(scheduler: Any) -> Callable[[Any], str]:
    """By what name the scheduler has a stream."""
    owners = {"schedule": "schedule_stream", "forward": "forward_stream", "copy": "copy_stream"}

    def name(stream: Any) -> str:
        held = {word: getattr(scheduler, attribute, None) for word, attribute in owners.items()}
        held["lengths"] = getattr(getattr(scheduler, "future_map", None), "fwd_prepare_d2h_stream", None)
        return next((word for word, known in held.items() if known is not None and known == stream), "another")

    return name
