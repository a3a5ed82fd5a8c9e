"""What the prefix cache has when a request is looked up in it, and before a retraction."""

from collections.abc import Callable
from typing import Any

import numpy as np

from eagletwin.harness.core.arrays import Array

from .host_tier import HostTier
from .pools import Allocation
from .wraps import Around, Wraps

# What the prefix cache has when a request is looked up in it. Called by taps.py.
#
# Where layers have windows, SGLang works out then how much of its prompt the request gives the cache first. What the cache has
# when the iteration begins, or the batch, is something else: a retraction evicts before the look-up, and the batch behind it.

# request, and slots by name
LookedUp = Callable[[str, dict[str, Array]], None]


class LookUps:
    """Of one scheduler, whose prefix cache this is."""

    def __init__(self, cache: Any, allocation: Allocation, host_tier: HostTier | None) -> None:
        self._cache, self._allocation, self._host_tier = cache, allocation, host_tier

    def watch(self, wraps: Wraps, looked_up: LookedUp) -> None:
        """Have every look-up told: a request that waits has one in each iteration, and the last one counts."""
        from sglang.srt.managers.schedule_batch import Req

        def around(call: Around, request: Any, tree_cache: Any = None, *args: Any, **kwargs: Any) -> None:
            call(request, tree_cache, *args, **kwargs)
            if tree_cache is self._cache:  # one that goes on with its next chunk is given none
                looked_up(request.rid, self._slots())

        wraps.function(Req, "init_next_round_input", around)

    def _slots(self) -> dict[str, Array]:
        host = np.empty(0, np.int64) if self._host_tier is None else self._host_tier.owned()
        return {"cached": self._allocation.cached(), "host": host}


def look_ups_of(scheduler: Any, allocation: Allocation, host_tier: HostTier | None) -> LookUps | None:
    """Of a scheduler whose model has windows."""
    return LookUps(scheduler.tree_cache, allocation, host_tier) if allocation.has_windows else None


# What the prefix cache has when the result of a batch is looked at before a retraction by an event. Called by taps.py.
#
# With overlap SGLang then looks at what is under way as it receives the event, and a request may end with it. The retraction,
# and the batch of the same iteration, may evict its rows before the next iteration begins.

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
