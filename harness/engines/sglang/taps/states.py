"""States of layers that keep one in place of rows, seen from outside: by request, poison, and who owns which slot.

A request has one slot for all such layers. What verify computes for each node lies in buffers of its own, of which the commit
takes one node's. Called by the taps and accounts.py. Seen on 0.5.23.
"""

from array import array
from typing import Any

import numpy as np
import torch

from eagletwin.harness.core.arrays import Array, counts_of
from eagletwin.harness.core.poison import STATE_POISON
from eagletwin.harness.core.trace import on_host, snapshot


class StatePool:
    """The pool of one target. Slot 0 takes padding, and has no owner."""

    def __init__(self, pool: Any, cache: Any) -> None:
        self._pool, self._cache_of = pool, cache
        self._cache = pool.mamba_pool.mamba_cache
        self._kept = (self._cache.temporal, *self._cache.conv)  # [L, slots, ..] each
        # [L, rows, nodes, ..] of the states; the windows of a chain's nodes overlap, and lie in one buffer [L, rows, C, ..]
        self._of_nodes = (self._cache.intermediate_ssm, *pool.mamba_pool._intermediate_conv_window_phys)

    @property
    def total(self) -> int:
        return int(self._pool.mamba_allocator.size)

    @staticmethod
    def slot(request: Any) -> int:
        """The slot that a request owns; -1: none."""
        return int(request.kv.mamba_pool_idx) if request.kv.holds_mamba else -1

    def of(self, request: Any) -> dict[str, Array]:
        """What is kept of a request [L, ..], where the kernels look for it, and that slot beside the request's own."""
        led = int(self._pool.req_index_to_mamba_index_mapping[request.kv.req_pool_idx])
        return {
            "state_slots": np.array([self.slot(request), led], np.int64),
            "target_state": snapshot(self._cache.temporal[:, led]),
            "target_conv": snapshot(self._cache.conv[0][:, led]),
        }

    def held(self, request: Any) -> list[int]:
        """All slots that a request owns: its own, and those in which a state is tracked for the prefix cache."""
        own = [self.slot(request)] if request.kv.holds_mamba else []
        tracked = getattr(request.kv, "mamba_ping_pong_track_buffer", None)
        if tracked is None:
            return own
        empty = request.kv.mamba_ping_pong_empty
        return own + [slot for slot, gone in zip(tracked.tolist(), empty, strict=True) if not gone]

    def cached(self) -> Array:
        """Slots that the prefix cache owns [n], sorted."""
        return np.sort(on_host(self._cache_of.all_mamba_values_flatten())).astype(np.int64)

    def of_prefix(self, tokens: list[int]) -> dict[str, Array]:
        """What the prefix cache keeps at the end of the longest prefix that a new request with these tokens would go on from;
        nothing without one."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey
        from sglang.srt.mem_cache.unified_cache.components.base import ComponentType

        match = self._cache_of.match_prefix(MatchPrefixParams(key=RadixKey(token_ids=array("q", tokens))))
        slot = self._cache_of.tree_core.get_component_device_value(match.best_match_node, ComponentType.MAMBA)
        if slot is None:
            return {}
        return {
            name: snapshot(kept[:, int(slot)]) for name, kept in zip(("cached_state", "cached_conv"), self._kept, strict=True)
        }

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
