"""SGLang's pools of KV rows and of states, seen from outside: rows by slot, poison, and who owns which slot. Called by the taps
and drive.py.

The pools may lie on a GPU; what goes in and comes out here is on the host.
"""

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagletwin.harness.core.arrays import Array, counts_of
from eagletwin.harness.core.records import GONE, KEY_POISON, LATENT_POISON, STATE_POISON, VALUE_POISON
from eagletwin.harness.core.trace import on_host, snapshot
from eagletwin.harness.engines.inside.blame import Wraps

from ..compat import memory


@dataclass(frozen=True, slots=True)
class Buffers:
    """What is stored of one layer; mapped: by slots of a window's own, which a mapping leads to.

    parts   [slots, G, D] each, by what they hold: keys and values; or latent rows, which are both
    poison  of each part
    """

    parts: dict[str, Tensor]
    poison: tuple[float, ...]
    mapped: bool = False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(self.parts.values())

    @property
    def first(self) -> Tensor:
        return self.tensors[0]


def _keys_and_values(keys: Tensor, values: Tensor, mapped: bool = False) -> Buffers:
    return Buffers({"keys": keys, "values": values}, (KEY_POISON, VALUE_POISON), mapped)


def buffers(pool: Any) -> list[Buffers]:
    """The layers of a runner's KV pool, in the model's order. A hybrid one has two pools inside, for layers with and without a
    window; one of latent rows has one buffer a layer. Layers that keep a state have no rows (below)."""
    if hasattr(pool, "compression_ratios"):  # bytes, which compressed_pool.py reads
        return [Buffers({"rows": rows}, (0,)) for rows in pool.swa_kv_pool.kv_buffer]
    if not hasattr(pool, "k_buffer") and hasattr(pool, "mamba_pool"):
        pool = pool.full_kv_pool
    if hasattr(pool, "kv_lora_rank"):
        return [Buffers({"latent rows": rows}, (LATENT_POISON,)) for rows in pool.kv_buffer]
    if not hasattr(pool, "layers_mapping"):
        return [_keys_and_values(*layer) for layer in zip(pool.k_buffer, pool.v_buffer, strict=True)]
    found = []
    for _, (index, mapped) in sorted(pool.layers_mapping.items()):
        inside = pool.swa_kv_pool if mapped else pool.full_kv_pool
        found.append(_keys_and_values(inside.k_buffer[index], inside.v_buffer[index], mapped))
    return found


_ONE = 0x38  # 1 in FP8 (e4m3)


class IndexKeys:
    """Keys by which an indexer chooses rows, where a pool of latent rows has them beside: numbers in FP8 (e4m3), all of a page,
    and behind them a scale of each row."""

    def __init__(self, pool: Any) -> None:
        self._page, self._width = int(pool.index_page_size), int(pool.index_head_dim)
        self.layers: list[Tensor] = list(pool.index_k_with_scale_buffer)  # [pages, bytes] each

    def _parts(self, layer: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers, as bytes [pages, P, D], and scales [pages, P] of a layer, where they are stored."""
        end = self._page * self._width
        numbers = layer[:, :end].view(-1, self._page, self._width)
        return numbers, layer[:, end:].view(torch.float32)

    def rows(self, slots: Array) -> Array:
        """[n, 1, L, 1, D], as they are read."""
        at = torch.from_numpy(slots).to(self.layers[0].device)
        page, within = at // self._page, at % self._page
        found = []
        for numbers, scales in map(self._parts, self.layers):
            found.append(numbers[page, within].view(torch.float8_e4m3fn).float() * scales[page, within][:, None])
        return on_host(torch.stack(found, 1))[:, None, :, None]

    def poison(self, slots: Tensor) -> None:
        slots = slots.to(self.layers[0].device)
        page, within = slots // self._page, slots % self._page
        for numbers, scales in map(self._parts, self.layers):
            numbers[page, within] = _ONE
            scales[page, within] = LATENT_POISON

    def poison_all(self) -> None:
        self.poison(torch.arange(len(self.layers[0]) * self._page))


def _in_numpy(layer: Buffers) -> bool:
    """Whether numpy can read the layer's rows where they lie, by the runner's own slots: some twenty times as fast."""
    return layer.first.is_cpu and layer.first.dtype is not torch.bfloat16 and not layer.mapped


class Pool:
    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._layers = buffers(pool)
        self._in_numpy = all(map(_in_numpy, self._layers))
        self._index = IndexKeys(pool) if hasattr(pool, "index_k_with_scale_buffer") else None
        self._arrays = [[part.numpy() for part in layer.tensors] for layer in self._layers] if self._in_numpy else []

    def _slots(self, layer: Buffers, slots: Tensor) -> Tensor:
        """The layer's own slots [n] of the runner's."""
        slots = slots.to(layer.first.device)
        if not layer.mapped:
            return slots
        mapped: Tensor = self._pool.full_to_swa_index_mapping[slots]
        return mapped.to(torch.int64)

    def rows(self, slots: Array) -> Array:
        """What is stored in slots [n], of each part: [n, 2, L, G, D]; of latent rows [n, 1, L, 1, D], with an indexer's keys
        behind them.

        Of a slot that leads to none of the window's, the layers with a window have nothing: GONE."""
        found = self._rows(slots)
        return found if self._index is None else np.concatenate([found, self._index.rows(slots).astype(found.dtype)], -1)

    def _rows(self, slots: Array) -> Array:
        if self._in_numpy:
            first = self._arrays[0][0]
            found: Array = np.empty((len(slots), len(self._arrays[0]), len(self._arrays), *first.shape[1:]), first.dtype)
            for layer, arrays in enumerate(self._arrays):
                for part, rows in enumerate(arrays):
                    found[:, part, layer] = rows[slots]
            return found
        at = torch.from_numpy(slots)
        by_layer = [self._slots(layer, at) for layer in self._layers]
        parts = list(zip(*(layer.tensors for layer in self._layers), strict=True))  # of each part its layers
        selected = [self._select_rows(*those) for part in parts for those in zip(self._layers, part, by_layer, strict=True)]
        together = on_host(torch.stack(selected, 1))
        return together.reshape(len(slots), len(parts), len(self._layers), *together.shape[2:])

    @staticmethod
    def _select_rows(layer: Buffers, rows: Tensor, at: Tensor) -> Tensor:
        """The rows at a layer's own slots [n]."""
        found = rows.index_select(0, at)
        if layer.mapped:
            found[at == 0] = GONE
        return found

    def rows_of(self, parts: list[Array]) -> list[Array]:
        """Of each of several lists of slots: its rows. All are read at once."""
        lengths = [len(part) for part in parts]
        rows = self.rows(np.concatenate(parts))
        return [rows[end - length : end] for end, length in zip(accumulate(lengths), lengths, strict=True)]

    def kept_of(self, row: int, table: Array) -> dict[str, Array]:  # noqa: ARG002
        """What the pool keeps of a request beside its rows: nothing."""
        return {}

    def copies(self) -> list[Tensor]:
        return [part.clone() for layer in self._layers for part in layer.tensors]

    def slots_that_differ(self, copies: list[Tensor], first: int) -> Array:
        """The slots, from `first` on, in which something else is stored than in these copies; of a window, its own slots."""
        parts = [part for layer in self._layers for part in layer.tensors]
        pairs = zip(parts, copies, strict=True)
        differing = [torch.nonzero((now != before).flatten(1).any(1))[:, 0] for now, before in pairs]
        slots = on_host(torch.unique(torch.cat(differing)))
        return slots[slots >= first]

    def poison_all(self) -> None:
        for layer in self._layers:
            for rows, poison in zip(layer.tensors, layer.poison, strict=True):
                rows.fill_(poison)
        if self._index is not None:
            self._index.poison_all()

    def poison(self, freed: Array, used: Array) -> None:
        """Poison the slots `freed` [n]. Of a layer with slots of its own: all but those that `used` [m], all that are not free,
        lead to; where a free one leads to may be another's."""
        if self._index is not None:
            self._index.poison(torch.from_numpy(freed))
        if self._in_numpy:
            for layer, arrays in zip(self._layers, self._arrays, strict=True):
                for stored, poison in zip(arrays, layer.poison, strict=True):
                    stored[freed] = poison
            return
        for layer in self._layers:
            slots = self._slots(layer, torch.from_numpy(used if layer.mapped else freed))
            for buffer, poison in zip(layer.tensors, layer.poison, strict=True):
                if layer.mapped:
                    rows = buffer.index_select(0, slots)
                    buffer.fill_(poison).index_copy_(0, slots, rows)
                else:
                    buffer.index_fill_(0, slots, poison)


class Allocation:
    """The scheduler's slot allocator and prefix cache: what is free, cached and held, as sets of slots."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        allocator = scheduler.token_to_kv_pool_allocator
        # of a hybrid pool: the allocator of all slots; the window's are given with them, and taken with them or before
        self._allocator = getattr(allocator, "full_attn_allocator", allocator)
        self._window = getattr(allocator, "swa_attn_allocator", None)
        self._leads_to: Tensor | None = getattr(allocator, "full_to_swa_index_mapping", None)
        self._page = int(scheduler.page_size)
        self._table: Tensor = scheduler.req_to_token_pool.req_to_token
        self._rows = self._table.numpy() if self._table.is_cpu else self._table  # numpy cuts in a third of the time
        self._reach = 0  # no slot from here on was seen to be written, used or owned since the case began
        self._seen: list[Array] = []  # slots that may lie behind it

    @property
    def total(self) -> int:
        return int(self._scheduler.max_total_num_tokens)

    def free(self) -> Array:
        """How often the allocator's free list has each slot [n]; n is larger than the pool if it has one from outside."""
        pages = on_host(memory.free_pages(self._allocator))
        return counts_of(self._slots_of_pages(pages), self.total + self._page)  # the first page takes padding

    def used(self, free: Array) -> Array:
        """All slots that are not free [n]: those with an owner, those that were lost, and those that take padding."""
        return np.flatnonzero(free[: self.total + self._page] == 0)

    def note_slots(self, slots: Array) -> None:
        """Note that these slots have an owner or were written to."""
        self._seen.append(slots)

    def freed_slots(self, free: Array, used: Array) -> Array:
        """Free slots [n] that may have been written since the case began: all up to the highest that was seen."""
        seen = np.concatenate([used, *self._seen], None)
        self._seen.clear()
        self._reach = max(self._reach, 1 + int(seen.max(initial=0)))
        return np.flatnonzero(free[: min(self._reach, self.total + self._page)])

    def cached(self) -> Array:
        """Slots that the prefix cache owns [n], sorted (it walks its tree in no order); empty without a cache."""
        cache = self._scheduler.tree_cache
        if sum(memory.cached_sizes(cache)) == 0:
            return np.empty(0, np.int32)
        return np.sort(on_host(cache.all_values_flatten())).astype(np.int32)

    def cached_prefix(self, tokens: list[int], apart: str | None) -> Array:
        """Slots of the longest cached prefix of a token sequence [n]: what a new request with these tokens would reuse.

        apart: SGLang's extra_key, which keeps rows of one adapter from those of others"""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        cache = self._scheduler.tree_cache
        match = cache.match_prefix(MatchPrefixParams(key=RadixKey(token_ids=array("q", tokens), extra_key=apart)))
        return snapshot(memory.matched_slots(cache, match))

    def counts(self) -> dict[str, int]:
        """The release's own figures, in slots."""
        evictable, protected = memory.cached_sizes(self._scheduler.tree_cache)
        available = int(self._allocator.available_size())
        return {"total": self.total, "available": available, "evictable": evictable, "protected": protected}

    def held_slots(self, request: Any) -> list[int]:
        """Slots that a request owns beyond what the prefix cache owns for it, in whole pages, sorted."""
        return self._owned_slots(memory.request_memory(request))

    def _owned_slots(self, held: memory.RequestMemory) -> list[int]:
        if held.row is None:
            return []
        row: list[int] = self._rows[held.row, held.protected : held.allocated].tolist()
        if self._page == 1:
            return sorted(set(row))
        pages = sorted({slot // self._page for slot in row})
        return [slot for page in pages for slot in range(page * self._page, (page + 1) * self._page)]

    def kept_by_sessions(self, requests: Iterable[Any]) -> dict[str, list[int]]:
        """By session: slots that it owns beyond what the prefix cache owns for it, in whole pages, sorted. A session's request
        that runs holds them itself."""
        records = memory.session_records(self._scheduler)
        running = {id(request.kv) for request in requests} if records else set()
        return {name: self._owned_slots(memory.held_by(kept)) for name, kept in records.items() if id(kept) not in running}

    @property
    def has_windows(self) -> bool:
        """Whether layers with a window have slots of their own."""
        return self._window is not None

    def window_slots(self, slots: Array) -> Array:
        """The window's slot that each slot [n] leads to; 0: none, or none any more."""
        assert self._leads_to is not None
        return on_host(self._leads_to[torch.from_numpy(slots.astype(np.int64)).to(self._leads_to.device)]).astype(np.int64)

    def window_free(self) -> Array:
        """How often the free list of the window's slots has each of them [n]."""
        assert self._window is not None
        pages = on_host(memory.free_pages(self._window))
        return counts_of(self._slots_of_pages(pages), int(self._window.size) + self._page)

    def window_pages(self, slots: Array) -> Array:
        """The window's slots that these slots [n] hold, in whole pages: those of each page of theirs, once."""
        led = self.window_slots(slots)
        if self._page == 1:
            return led[led > 0]
        pairs = np.stack([slots // self._page, led // self._page], 1)[led > 0]
        return self._slots_of_pages(np.unique(pairs, axis=0)[:, 1])

    def window_counts(self) -> dict[str, int]:
        """The release's own figures of the window's slots."""
        assert self._window is not None
        cache = self._scheduler.tree_cache
        return {
            "window_total": int(self._window.size),
            "window_available": int(self._window.available_size()),
            "window_evictable": int(cache.swa_evictable_size()),
            "window_protected": int(cache.swa_protected_size()),
        }

    def lives(self, request: Any) -> bool:
        """Whether a request has slots. All may be the prefix cache's: where its keys are single tokens, all of a prompt is."""
        held = memory.request_memory(request)
        return held.row is not None and held.allocated > 0

    def allocated_slots(self, request: Any) -> Array:
        """Every slot in the request's req_to_token, by position, as far as it is allocated [n]; shared prefixes included."""
        held = memory.request_memory(request)
        return np.empty(0, np.int64) if held.row is None else self._cut(held.row, held.allocated)

    def table(self, request: Any, end: int) -> Array:
        """A copy of the request's first `end` entries of req_to_token, as int64: position -> slot."""
        return self._cut(memory.request_memory(request).row, end)

    def _cut(self, row: int | None, end: int) -> Array:
        part = self._rows[row, :end]
        return (on_host(part) if isinstance(part, Tensor) else part).astype(np.int64)

    def _slots_of_pages(self, pages: Array) -> Array:
        if self._page == 1:
            return pages
        return (pages.astype(np.int64)[:, None] * self._page + np.arange(self._page)).ravel()

    def forget(self) -> None:
        """Make req_to_token what it is in a fresh process; no slot may have an owner."""
        self._table.zero_()


# Layers that keep a state in place of rows: a request has one slot for all of them. What verify computes for each node lies in
# buffers of its own, of which the commit takes one node's.


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
            "state_slots": np.array([memory.state_slot(request), led], np.int64),
            "target_state": snapshot(self._cache.temporal[:, led]),
            "target_conv": snapshot(self._cache.conv[0][:, led]),
        }

    def held_slots(self, request: Any) -> list[int]:
        """All slots that a request owns: its own, and those in which a state is tracked for the prefix cache."""
        own = memory.state_slot(request)
        return [slot for slot in (own, *memory.tracked_slots(request)) if slot >= 0]

    def cached(self) -> Array:
        """Slots that the prefix cache owns [n], sorted."""
        return np.sort(on_host(memory.cached_slots(self._cache_of))).astype(np.int64)

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
        return {"tracked": np.array(slots, np.int64)} | self._stack_states("tracked", slots)

    def _stack_states(self, name: str, slots: list[int]) -> dict[str, Array]:
        """States and windows in these slots [n, L, ..]."""
        kept = [[snapshot(part[:, slot]) for slot in slots] for part in self._kept]
        states, windows = (np.stack(part) if part else np.empty(0, np.float32) for part in kept)
        return {f"{name}_state": states, f"{name}_conv": windows}

    def of_prefixes(self, tokens: list[int]) -> dict[str, Array]:
        """The states that the prefix cache keeps on the path of these tokens, the deepest first: after how many [n], and
        they [n, L, ..]."""
        path = memory.of_prefixes(self._cache_of, tokens)
        ends = np.array([end for end, _ in path], np.int64)
        return {"cached_ends": ends} | self._stack_states("cached", [int(slot) for _, slot in path])

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
    pool = scheduler.req_to_token_pool
    return StatePool(pool, scheduler.tree_cache) if hasattr(pool, "mamba_pool") else None
