"""vLLM's KV cache, seen from outside: rows by slot, poison, and who owns which slot.

A slot is a row of a block: block number times page size, and the row in it. Block 0 is the null block, which takes padding, as
SGLang's first page does. Target and draft have the same block table, and so the same slots.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from eagletwin.harness.core.arrays import Array, runs_of
from eagletwin.harness.core.records import KEY_POISON, VALUE_POISON

TARGET, DRAFT = "target", "draft"


class Pools:
    """The rows of target and draft, by the layers that keep them."""

    def __init__(self, core: Any, draft_layers: Iterable[str]) -> None:
        layers = core.vllm_config.compilation_config.static_forward_context
        self.draft_layers = frozenset(draft_layers)
        self._page = core.vllm_config.cache_config.block_size
        # [blocks, G, page, 2 * D] each: a row's key, then its value
        self._layers = {
            part: [layers[name].kv_cache for name in sorted(layers) if (name in self.draft_layers) == (part == DRAFT)]
            for part in (TARGET, DRAFT)
        }

    def rows(self, part: str, slots: Array) -> Array:
        """What is stored in slots [n]: [n, 2, L, G, D]."""
        block, row = torch.from_numpy(slots // self._page), torch.from_numpy(slots % self._page)
        stored = [torch.stack(cache[block, :, row].chunk(2, -1), 1) for cache in self._layers[part]]
        found: Array = torch.stack(stored, 2).numpy()
        return found

    def poison(self, blocks: Iterable[int] | None = None) -> None:
        """Poison these blocks; None: all."""
        at = slice(None) if blocks is None else torch.tensor(sorted(blocks), dtype=torch.int64)
        for cache in (*self._layers[TARGET], *self._layers[DRAFT]):
            width = cache.shape[-1] // 2
            cache[at, ..., :width] = KEY_POISON
            cache[at, ..., width:] = VALUE_POISON


class Blocks:
    """Who has which blocks: requests, the prefix cache, or nobody."""

    def __init__(self, core: Any) -> None:
        self._scheduler, self._manager = core.scheduler, core.scheduler.kv_cache_manager
        self._pool = self._manager.block_pool
        self._page = core.vllm_config.cache_config.block_size

    def of_request(self, name: str) -> list[int]:
        """A request's blocks, by position; none of one that has lost them."""
        return list(self._manager.get_block_ids(name)[0])

    def slots(self, blocks: Iterable[int]) -> Array:
        """The slots of these blocks, in their order."""
        first = np.fromiter(blocks, np.int64)[:, None] * self._page
        found: Array = (first + np.arange(self._page)).reshape(-1)
        return found

    def table(self, name: str) -> Array:
        """A request's slots, by position."""
        return self.slots(self.of_request(name))

    @property
    def live(self) -> list[str]:
        """The requests that have blocks."""
        return [request.request_id for request in self._scheduler.running]

    def cached(self) -> set[int]:
        """Blocks that a request can be given by their content, in use or not."""
        return {block.block_id for block in self._pool.blocks if block.block_hash is not None}

    def prefix(self, request: Any) -> Array:
        """Slots of as long a prefix of an engine's request as the prefix cache has for a new one with more tokens."""
        [found], *_ = self._manager.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens)
        return self.slots(block.block_id for block in found)

    def unheld(self) -> set[int]:
        """Blocks that nobody has: neither a request nor the prefix cache."""
        return {*self.free()} - self.cached()

    def free(self) -> list[int]:
        """Blocks that can be taken, with those that the prefix cache would give up."""
        return [block.block_id for block in self._pool.free_block_queue.get_all_free_blocks()]

    def account(self) -> tuple[dict[str, int], dict[str, Array]]:
        """Whose the slots are. vLLM counts a block that the prefix cache would give up as a free one."""
        free, cached = self.free(), self.cached()
        evictable = [block for block in free if block in cached]
        times = np.zeros((len(self._pool.blocks), self._page), np.int64)
        np.add.at(times, [block for block in free if block not in cached], 1)
        held = [block for name in self.live for block in self.of_request(name) if block not in cached]
        numbers = {
            "total": (len(self._pool.blocks) - 1) * self._page,
            "available": (self._pool.get_num_free_blocks() - len(evictable)) * self._page,
            "evictable": len(evictable) * self._page,
            "protected": (len(cached) - len(evictable)) * self._page,
            "live": len(self.live),
        }
        slots = {"cached": self.slots(sorted(cached)), "held": self.slots(held)}
        return numbers, {"free": runs_of(times.reshape(-1)), **slots}
