"""Memory in releases: free pages, what a request owns of rows and of states, what a prefix match found, the host's pool, and
what sessions keep."""

import contextlib
import importlib
import inspect
from array import array
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagletwin.harness.core.case import SGLangSettings
from eagletwin.harness.core.run_spec import Device
from eagletwin.harness.engines.inside.blame import NotDriven

from ..stand_ins import late_copies

# Where a release keeps its free pages, what a request owns of its row of req_to_token, and what a prefix match found.


class RequestMemory(NamedTuple):
    """A request's memory. `row` of req_to_token, None if it has none; the prefix cache owns positions [0, protected)."""

    row: int | None
    protected: int
    allocated: int


def request_memory(request: Any) -> RequestMemory:
    """0.5.19 and later have one record of it all; 0.5.16 to 0.5.18 a record of lengths, which comes and goes with the row;
    before that all of it is on the request."""
    if not hasattr(request, "kv"):
        return RequestMemory(request.req_pool_idx, request.cache_protected_len, request.kv_allocated_len)
    kv: Any = request.kv
    if hasattr(kv, "req_pool_idx"):
        return held_by(kv)
    return RequestMemory(request.req_pool_idx, request.cache_protected_len, 0 if kv is None else kv.kv_allocated_len)


def held_by(record: Any) -> RequestMemory:
    """The same by the record of it all, which a session has as well."""
    return RequestMemory(record.req_pool_idx, record.cache_protected_len, record.kv_allocated_len)


def free_pages(allocator: Any) -> Tensor:
    """Page numbers [n] in the free lists, in no order. Up to 0.5.19 pages can wait in a second list."""
    if hasattr(allocator, "get_all_free_pages"):
        pages: Tensor = allocator.get_all_free_pages()
        return pages
    return torch.cat([allocator.free_pages, allocator.release_pages])


def cached_sizes(cache: Any) -> tuple[int, int]:
    """Slots that the prefix cache may give back, and those that requests have locked. A cache for models with windows alone
    (SWARadixCache) has other names for them."""
    try:
        return int(cache.evictable_size()), int(cache.protected_size())
    except NotImplementedError:
        return int(cache.full_evictable_size()), int(cache.full_protected_size())


def matched_slots(cache: Any, match: Any) -> Tensor:
    """Slots [n] of a match in the prefix cache. From 0.5.22 on a match names the node only where its path ends."""
    if hasattr(cache, "path_device_indices"):
        slots: Tensor = cache.path_device_indices(match.last_device_node)
    else:
        slots = match.device_indices
    return slots.to(torch.int64)


# Which slots of states a request has, and what the prefix cache keeps of a prefix.
#
# From 0.5.19 on `request.kv` holds the slots; before it the request itself does. Which of its further slots are taken is
# written down from 0.5.23 on; before that each is, as soon as the request has them. A cache with a core of its own is asked by
# node; of one without, the node of a match has the slot, in 0.5.16 as the value of a component. Called by taps/pools.py. Seen
# on 0.5.13 to 0.5.23.


def _holder(request: Any) -> Any:
    kv = getattr(request, "kv", None)
    return kv if hasattr(kv, "mamba_pool_idx") else request


def row(request: Any) -> int:
    """The row of a request that has one, which leads to its slot."""
    found = request_memory(request).row
    assert found is not None
    return int(found)


def state_slot(request: Any) -> int:
    """The slot that a request owns; -1: none."""
    slot = _holder(request).mamba_pool_idx
    return -1 if slot is None else int(slot)


def tracked_slots(request: Any) -> list[int]:
    """Those in which a state is tracked for the prefix cache."""
    holder = _holder(request)
    slots = getattr(holder, "mamba_ping_pong_track_buffer", None)
    if slots is None:
        return []
    empty = getattr(holder, "mamba_ping_pong_empty", None)
    gone = [slot < 0 for slot in slots.tolist()] if empty is None else empty
    return [slot for slot, left in zip(slots.tolist(), gone, strict=True) if not left]


def windows_of_nodes(pool: Any) -> list[Tensor]:
    """What the convolutions of verify's nodes saw, as it lies in memory: 0.5.14 and later let a chain's windows overlap."""
    windows = pool.mamba_cache.intermediate_conv_window
    laid: list[Tensor] = getattr(pool, "_intermediate_conv_window_phys", windows)
    return laid


def cached_slots(cache: Any) -> Tensor:
    """Slots that the prefix cache owns [n]. Up to 0.5.21 a cache that is off has no answer."""
    if not hasattr(cache, "all_mamba_values_flatten"):
        return torch.zeros(0, dtype=torch.int64)
    slots: Tensor = cache.all_mamba_values_flatten()
    return slots


def giving_up(cache: Any) -> list[str]:
    """The methods by which a prefix cache may give up states. From 0.5.19 on what allocates has a way of its own."""
    if not hasattr(cache, "all_mamba_values_flatten"):
        return []
    return [name for name in ("evict", "evict_for_alloc", "reset") if hasattr(cache, name)]


def of_prefixes(cache: Any, tokens: list[int]) -> list[tuple[int, Any]]:
    """The states that the cache keeps on the path of these tokens, the deepest first: after how many, and in which slot."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    found: list[tuple[int, Any]] = []
    if not hasattr(cache, "all_mamba_values_flatten"):
        return found
    while tokens:
        match = cache.match_prefix(MatchPrefixParams(key=RadixKey(token_ids=array("q", tokens))))
        count = len(matched_slots(cache, match))
        if not count:
            break
        found.append((count, _state_of(cache, match)))
        tokens = tokens[: count - 1]
    return found


def _state_of(cache: Any, match: Any) -> Any:
    """The slot of the node that a match ended at."""
    if not hasattr(cache, "tree_core"):
        node = match.last_device_node
        if hasattr(node, "mamba_value"):
            return node.mamba_value
        from sglang.srt.mem_cache.unified_cache_components.tree_component import ComponentType as Component

        return match.best_match_node.component_data[Component.MAMBA].value
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    return cache.tree_core.get_component_device_value(match.best_match_node, ComponentType.MAMBA)


# SGLang's hierarchical cache: a second pool of rows in the host's memory, which the prefix cache writes to and loads from.
#
# On a GPU SGLang's own kernels copy them, in streams of their own; on a CPU late_copies.py does.

_COPIERS = ("sglang.srt.mem_cache.pool_host.mha", "sglang.srt.mem_cache.pool_host.mla", "sglang.srt.mem_cache.pool_host.mamba")
_STREAMED = ("sglang.srt.mem_cache.l2_transfer", "sglang.srt.managers.cache_controller")


def host_cache_arguments(settings: SGLangSettings, page_size: int, device: Device) -> dict[str, Any]:
    """SGLang has a padding page beside those of its ratio; half a slot keeps the ratio from being rounded down."""
    if not settings.host_pages:
        return {}
    return {
        "enable_hierarchical_cache": True,
        "hicache_ratio": ((settings.host_pages - 1) * page_size + 0.5) / settings.max_total_tokens,
        "hicache_write_policy": settings.host_policy,
        "hicache_io_backend": "kernel" if device == "cuda" else "direct",  # on a GPU what users have by default
        "hicache_mem_layout": "layer_first",
    }


def host_cache_pages(scheduler: Any) -> int:
    """How many pages of the host a scheduler's prefix cache has."""
    controller = getattr(scheduler.tree_cache, "cache_controller", None)
    return 0 if controller is None else int(controller.mem_pool_host.size) // int(scheduler.page_size)


def _merges_writes() -> bool:
    """Whether the controller puts writes off and merges them, as it does where its parts are those that the taps know."""
    with contextlib.suppress(ImportError):
        controller: Any = importlib.import_module("sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller")
        return "flush" in inspect.signature(controller.HybridCacheController.write).parameters
    return False


def prepare_host_cache(shims: list[str], device: Device) -> None:
    """Before a scheduler with a hierarchical cache is built. Raises NotDriven for a release whose cache is another one."""
    if not _merges_writes():
        raise NotDriven(
            "a hierarchical cache: of this release it has other parts (0.5.21 and later have those that are driven)"
        )
    base: Any = importlib.import_module("sglang.srt.mem_cache.pool_host.base")
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    shims.append("pool_host.base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0: a host pool of a case is some kilobytes")
    if device == "cuda":
        return
    for name in _COPIERS:
        importlib.import_module(name).transfer_kv_direct = late_copies.transfer_kv_direct  # type: ignore[attr-defined]
        shims.append(f"{name}.transfer_kv_direct: late_copies.py, from its semantics")
    for name in _STREAMED:
        importlib.import_module(name).device_module = late_copies  # type: ignore[attr-defined]
        shims.append(f"{name}.device_module: late_copies.py, which copies as late as what waits for it allows")
    common: Any = importlib.import_module("sglang.srt.mem_cache.pool_host.common")
    common._cuda_host_register = lambda *_args, **_named: None
    shims.append("pool_host.common._cuda_host_register: does nothing; there is no GPU to tell of the host's memory")


# What SGLang's streaming sessions keep of the pool. From 0.5.22 on the prefix cache owns their records; before that a session
# keeps a copy of its last request's, and is not driven.


def prepare_sessions(shims: list[str]) -> None:
    """Before a scheduler with sessions is built. Raises NotDriven for a release that keeps them in another way."""
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache

    if not hasattr(BasePrefixCache, "session_records"):
        raise NotDriven(
            "streaming sessions: this release keeps what is theirs in another place (from 0.5.22 on it is where it is known)"
        )
    shims.append("SessionController: ends sessions that wait for their last request in each iteration, and not once a second")


def end_waiting_sessions(scheduler: Any) -> None:
    """SGLang looks once a second for sessions that were closed while a request of theirs ran: a clock would decide in which
    iteration their slots become free."""
    scheduler.session_controller._last_reap_time = float("-inf")


def session_records(scheduler: Any) -> dict[str, Any]:
    """What each session keeps of the pool, by its name: its record of req_to_token and of lengths, as of a request. A request
    of the session that runs has the same one."""
    kept: dict[str, Any] = getattr(scheduler.tree_cache, "session_records", dict)()
    return kept
