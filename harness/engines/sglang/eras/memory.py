"""Where a release keeps its free pages, what a request owns of its row of req_to_token, and what a prefix match found."""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Held(NamedTuple):
    """A request's memory. `row` of req_to_token, None if it has none; the prefix cache owns positions [0, protected)."""

    row: int | None
    protected: int
    allocated: int


def held(request: Any) -> Held:
    """0.5.19 and later have one record of it all; 0.5.16 to 0.5.18 a record of lengths, which comes and goes with the row;
    before that all of it is on the request."""
    if not hasattr(request, "kv"):
        return Held(request.req_pool_idx, request.cache_protected_len, request.kv_allocated_len)
    kv: Any = request.kv
    if hasattr(kv, "req_pool_idx"):
        return held_by(kv)
    return Held(request.req_pool_idx, request.cache_protected_len, 0 if kv is None else kv.kv_allocated_len)


def held_by(record: Any) -> Held:
    """The same by the record of it all, which a session has as well."""
    return Held(record.req_pool_idx, record.cache_protected_len, record.kv_allocated_len)


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
