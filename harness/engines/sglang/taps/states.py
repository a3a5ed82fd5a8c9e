"""States of layers that keep one in place of rows, seen from outside: by request, poison, and who owns which slot.

A request has one slot for all such layers. What verify computes for each node lies in buffers of its own, of which the commit
takes one node's. Called by the taps and accounts.py.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from eagletwin.harness.core.arrays import Array, counts_of
from eagletwin.harness.core.records import STATE_POISON
from eagletwin.harness.core.trace import on_host, snapshot

from ..compat import memory
from .wraps import Wraps


class StatePool:
    """The pool of one target. Slot 0 takes padding, and has no owner."""

    def __init__(self, pool: Any, cache: Any) -> None:
        self._pool, self._cache_of = pool, cache
        self._cache = pool.mamba_pool.mamba_cache
        self._kept = (self._cache.temporal, *self._cache.conv)  # [L, slots, ..] each
        # [L, rows, nodes, ..] of the states; the windows of a chain's nodes overlap, and lie in one buffer [L, rows, C, ..]
        self._of_nodes = (self._cache.intermediate_ssm, *memory.windows_of_nodes(pool.mamba_pool))
        self._known: dict[int, tuple[Array, ...]] = {}  # slot of the prefix cache -> what it held when last looked at
        self.given_up = 0

    @property
    def total(self) -> int:
        return int(self._pool.mamba_allocator.size)

    def of(self, request: Any) -> dict[str, Array]:
        """What is kept of a request [L, ..], where the kernels look for it, and that slot beside the request's own."""
        led = int(self._pool.req_index_to_mamba_index_mapping[memory.row(request)])
        return {
            "state_slots": np.array([memory.own(request), led], np.int64),
            "target_state": snapshot(self._cache.temporal[:, led]),
            "target_conv": snapshot(self._cache.conv[0][:, led]),
        }

    def held(self, request: Any) -> list[int]:
        """All slots that a request owns: its own, and those in which a state is tracked for the prefix cache."""
        own = memory.own(request)
        return [slot for slot in (own, *memory.tracked(request)) if slot >= 0]

    def cached(self) -> Array:
        """Slots that the prefix cache owns [n], sorted."""
        return np.sort(on_host(memory.cached(self._cache_of))).astype(np.int64)

    def watch(self, wraps: Wraps) -> None:
        """Count in `given_up` how often the prefix cache gave up a state: evicted it, or forgot all."""
        for name in memory.giving_up(self._cache_of):
            wraps.method(self._cache_of, name, self._around_giving_up)

    def _around_giving_up(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = len(self.cached())
        result = call(*args, **kwargs)
        self.given_up += len(self.cached()) < before
        return result

    def anew(self, cached: Array) -> dict[str, Array]:
        """Of the slots that the prefix cache owns [n]: those that are new or hold something else than when last looked at [m],
        and the states and windows in them [m, L, ..]."""
        held = {slot: tuple(snapshot(kept[:, slot]) for kept in self._kept) for slot in cached.tolist()}
        known, self._known = self._known, held
        slots = [slot for slot, now in held.items() if slot not in known or not all(map(np.array_equal, now, known[slot]))]
        return {"tracked": np.array(slots, np.int64)} | self._stacked("tracked", slots)

    def _stacked(self, name: str, slots: list[int]) -> dict[str, Array]:
        """States and windows in these slots [n, L, ..]."""
        kept = [[snapshot(part[:, slot]) for slot in slots] for part in self._kept]
        states, windows = (np.stack(part) if part else np.empty(0, np.float32) for part in kept)
        return {f"{name}_state": states, f"{name}_conv": windows}

    def of_prefixes(self, tokens: list[int]) -> dict[str, Array]:
        """The states that the prefix cache keeps on the path of these tokens, the deepest first: after how many [n], and
        they [n, L, ..]."""
        path = memory.of_prefixes(self._cache_of, tokens)
        ends = np.array([end for end, _ in path], np.int64)
        return {"cached_ends": ends} | self._stacked("cached", [int(slot) for _, slot in path])

    def free(self) -> Array:
        """How often the free list has each slot [n]."""
        return counts_of(on_host(self._pool.mamba_allocator.free_slots), self.total + 1)

    def poison_all(self) -> None:
        for kept in self._kept:
            kept.fill_(STATE_POISON)
        self.poison_nodes()

    def poison(self, free: Array) -> None:
        """Poison the free slots, of which the free list has each so often as `free` says; and what verify left of its nodes."""
        slots = torch.from_numpy(np.flatnonzero(free[: self.total + 1]))
        for kept in self._kept:
            kept[:, slots] = STATE_POISON
        self.poison_nodes()

    def poison_nodes(self) -> None:
        for nodes in self._of_nodes:
            nodes.fill_(STATE_POISON)


def states_of(scheduler: Any) -> StatePool | None:
    """Of a target that has such layers."""
    pool = scheduler.req_to_token_pool
    return StatePool(pool, scheduler.tree_cache) if hasattr(pool, "mamba_pool") else None
