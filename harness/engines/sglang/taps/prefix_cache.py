"""The prefix cache and its tier in the host's memory, seen from outside. Called by the taps and drive.py."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagletwin.harness.core.arrays import Array, counts_of, runs_of
from eagletwin.harness.core.records import KEY_POISON, LATENT_POISON, VALUE_POISON
from eagletwin.harness.core.trace import snapshot
from eagletwin.harness.engines.inside.blame import Around, Wraps

from .pools import Allocation

# The hierarchical cache's pools in the host's memory: what is copied, who owns which slot, and poison.
#
# A row's slot on the host is that of the target's pool; the draft's rows lie in a pool of their own under the same number, or
# behind the target's layers in the same one. Layers with a window have slots of their own here, too.

# What a trace calls the slots of a pool, by the pool whose numbers they are; and the tree's component that owns them.
_SPACES = {"kv": ("", "FULL"), "swa": ("window_", "SWA")}

# request that it is for, "" if none; whether it is a load-back; slots by name
Copied = Callable[[str, bool, dict[str, Array]], None]


class HostTier:
    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._controller = cache.cache_controller
        self._for = ""
        self._owned: dict[str, Counter[int]] = {prefix: Counter() for prefix, _ in _SPACES.values()}

    def watch(self, wraps: Wraps, copied: Copied) -> None:
        """Have every copy told that the prefix cache asks for, as it asks: with the slots that its tree has for both ends."""
        controller = self._controller

        def load_back(call: Around, params: Any) -> Any:
            self._for = params.req.rid
            try:
                return call(params)
            finally:
                self._for = ""

        def around(restore: bool, queue: str) -> Around:
            def enqueue(call: Around, *args: Any, **kwargs: Any) -> Any:
                before = len(getattr(controller, queue))
                found = call(*args, **kwargs)
                if found is not None and len(getattr(controller, queue)) > before:
                    slots = _slots(getattr(controller, queue)[-1])
                    copied(self._for if restore else "", restore, slots)
                    for prefix, owned in self._owned.items() if not restore else ():
                        owned.update(slots.get(f"{prefix}host", np.empty(0, np.int64)).tolist())
                return found

            return enqueue

        def given_back(call: Around, frees: dict[Any, list[Tensor]]) -> None:
            for kind, values in frees.items():
                self._given_back(kind.name, values)
            call(frees)

        def clear(call: Around) -> None:
            for owned in self._owned.values():
                owned.clear()
            call()

        wraps.method(self._cache, "_drain_host_frees", given_back)
        wraps.method(controller.mem_pool_host, "clear", clear)
        wraps.method(self._cache, "init_load_back", load_back)
        wraps.method(controller, "write", around(False, "write_queue"))
        wraps.method(controller, "load", around(True, "load_queue"))

    @property
    def copying(self) -> int:
        """Copies that the prefix cache does not know to be done yet: it has locked their slots."""
        return len(self._cache.ongoing_write_through) + len(self._cache.ongoing_load_back)

    def slots(self) -> tuple[dict[str, int], dict[str, Array]]:
        """Whose the slots are: numbers and tensors by name."""
        numbers, tensors = {"copying": self.copying}, dict[str, Array]()
        for prefix, pool in self._spaces():
            numbers |= {f"host_{prefix}total": int(pool.size), f"host_{prefix}available": int(pool.available_size())}
            tensors[f"host_{prefix}free"] = runs_of(self._free(pool))
            tensors[f"host_{prefix}cached"] = self.owned_slots(prefix)
        return numbers, tensors

    def owned_slots(self, prefix: str = "") -> Array:
        """Slots of a space that the prefix cache owns [n], sorted; of one that it owns twice both."""
        return np.array(sorted((+self._owned[prefix]).elements()), np.int64)

    def poison_all(self) -> None:
        for entry in self._controller.mem_pool_host.entries:
            _poison(entry.host_pool, slice(None))

    def poison_free(self) -> None:
        """Until now free slots hold plausible rows of whoever had them."""
        free = {pool: self._free(pool) for _, pool in self._spaces()}
        sources = {spec.pool_name: spec.indices_from_pool for spec in self._cache.sidecar_pool_specs}
        group = self._controller.mem_pool_host
        for entry in group.entries:
            listed = free[group.get_pool(sources.get(entry.name, entry.name))]
            _poison(entry.host_pool, torch.from_numpy(np.flatnonzero(listed)))

    def _spaces(self) -> Iterator[tuple[str, Any]]:
        """Prefix and pool of each space of slots."""
        for entry in self._controller.mem_pool_host.entries:
            if entry.name.value in _SPACES:
                yield _SPACES[entry.name.value][0], entry.host_pool

    @staticmethod
    def _free(pool: Any) -> Array:
        """How often the free list has each slot [n]."""
        return counts_of(snapshot(torch.cat([pool.free_slots, *pool.release_slots])), int(pool.size))

    def _given_back(self, component: str, values: list[Tensor]) -> None:
        """The tree has no slots of the host any more that it had."""
        prefix = next(prefix for prefix, own in _SPACES.values() if own == component)
        self._owned[prefix].subtract(torch.cat(values).tolist() if values else ())


def host_tier_of(scheduler: Any) -> HostTier | None:
    """Of a scheduler whose prefix cache has such pools."""
    cache = scheduler.tree_cache
    return HostTier(cache) if getattr(cache, "cache_controller", None) is not None else None


def _slots(operation: Any) -> dict[str, Array]:
    """Slots of the device [n] and of the host [n] that a copy goes between; of windows where there are any to copy."""
    found = {"device": snapshot(operation.device_indices), "host": snapshot(operation.host_indices)}
    for transfer in operation.pool_transfers or ():
        if transfer.name.value == "swa":
            found |= {"window_device": snapshot(transfer.device_indices), "window_host": snapshot(transfer.host_indices)}
    return {name: slots.astype(np.int64) for name, slots in found.items()}


def _poison(pool: Any, slots: Tensor | slice) -> None:
    """layer_first: [2, L, slots, G, D] of keys and values; [L, slots, 1, D] of latent rows."""
    buffer: Tensor = pool.kv_buffer
    parts = ((buffer, LATENT_POISON),) if buffer.dim() == 4 else ((buffer[0], KEY_POISON), (buffer[1], VALUE_POISON))
    for rows, poison in parts:
        rows[:, slots] = poison


# What the prefix cache has when a request is looked up in it. Called by taps.py.
#
# Where layers have windows, SGLang works out then how much of its prompt the request gives the cache first. What the cache has
# when the iteration begins, or the batch, is something else: a retraction evicts before the look-up, and the batch behind it.


# request, and slots by name
LookedUp = Callable[[str, dict[str, Array]], None]


class LookUps:
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
        host = np.empty(0, np.int64) if self._host_tier is None else self._host_tier.owned_slots()
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
    def __init__(self, scheduler: Any, allocation: Allocation) -> None:
        self._scheduler, self._allocation = scheduler, allocation

    def watch(self, wraps: Wraps, read: Read) -> None:

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
