"""What the prefix cache has when the result of a batch is looked at before a retraction by an event. Called by taps.py.

With overlap SGLang then looks at what is under way as it receives the event, and a request may end with it. The retraction, and
the batch of the same iteration, may evict its rows before the next iteration begins.
"""

from collections.abc import Callable
from typing import Any

from eagletwin.harness.core.arrays import Array

from .pools import Allocation
from .wraps import Around, Wraps

Read = Callable[[dict[str, Array]], None]


class PausedReads:
    """Of one scheduler, whose slots these are."""

    def __init__(self, scheduler: Any, allocation: Allocation) -> None:
        self._scheduler, self._allocation = scheduler, allocation

    def watch(self, wraps: Wraps, read: Read) -> None:
        """Have it told each time."""

        def around(call: Around, *args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            # no batch runs in a pause, and no result is looked at: a retraction begins one, and then looks at what is under way
            if self._scheduler._engine_paused:
                read({"cached": self._allocation.cached()})
            return result

        wraps.method(self._scheduler, "process_batch_result", around)


def reads_of(scheduler: Any, allocation: Allocation) -> PausedReads | None:
    """Of a scheduler with overlap, and a prefix cache that keeps anything."""
    caches = not scheduler.server_args.disable_radix_cache
    return PausedReads(scheduler, allocation) if scheduler.enable_overlap and caches else None
