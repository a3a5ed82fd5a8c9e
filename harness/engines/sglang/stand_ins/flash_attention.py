"""FlashAttention 3 in torch, from the documented meaning of its arguments: attention of rows in lists or pages, and the merge
of two parts of a softmax.

A kernel has addresses and no lengths: columns of a page table past the end of its row are those of the next row, as on a GPU.
A page that the cache lacks, and a column past the memory of the table, are OutOfBounds. Rows of queries that no sequence has,
and those past max_seqlen_q, keep what lies in memory that nobody wrote: NaN here.
"""

from typing import Any

import torch
from torch import Tensor

from eagletwin.harness.engines.inside.blame import demand, demand_shapes, own_code, theirs
from eagletwin.harness.engines.triton_cpu import OutOfBounds

theirs.append(OutOfBounds)
faults: list[OutOfBounds] = []  # of this case
_IGNORED = ("scheduler_metadata", "num_splits", "pack_gqa", "sm_margin", "ver", "cu_seqlens_k_new", "only_qv")  # how, not what


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    page_table: Tensor,
    cache_seqlens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    qv: Tensor | None = None,
    **more: Any,
) -> Any:
    """Outputs [T, H, C] of q [T, H, D]; with return_softmax_lse also the logarithms of the sums [H, T].

    k_cache, v_cache  [pages, page size, G, D] and [.., C]; page_table [B, width] int32: the pages of each sequence
    cache_seqlens     [B] int32: rows of each sequence; cu_seqlens_q [B + 1] int32: where its queries begin and end
    qv                [T, H, C]: its product with the values is added to the scores
    more              causal, window_size, softmax_scale, softcap, sinks, out, return_softmax_lse, as in _attend
    Raises OutOfBounds, and BadArguments for what the kernel refuses.
    """
    demand(page_table.dim() == 2 and page_table.stride(1) == 1, "a page table that is no list of rows")
    demand(k_cache.stride(-1) == v_cache.stride(-1) == 1, "rows of the cache that are not contiguous")
    lengths = _lengths(cache_seqlens, cu_seqlens_q)
    demand_shapes((len(lengths),), cache_seqlens)
    demand(len(page_table) >= len(lengths), f"{len(page_table)} rows of pages for {len(lengths)} sequences")
    demand(page_table.dtype == torch.int32, f"page_table is {page_table.dtype}, and not torch.int32")
    size, order = k_cache.shape[1], torch.arange(max([1, *lengths]))
    pages = _pages(page_table, lengths, size)[:, order // size]
    read = order < cache_seqlens[:, None]
    if bool((outside := read & ((pages < 0) | (pages >= len(k_cache)))).any()):
        number, column = outside.nonzero()[0].tolist()
        where = f"sequence {number}, row {column}: page {int(pages[number, column])} of {len(k_cache)}"
        raise _outside(where)
    slots = torch.where(read, pages * size + order % size, 0)
    k, v = (cache.flatten(0, 1)[slots] for cache in (k_cache, v_cache))
    return _attend(q, qv, k, v, cache_seqlens, cu_seqlens_q, max_seqlen_q, **more)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, **more: Any
) -> Any:
    """The same, of rows k [S, G, D] and v [S, G, C] that lie one sequence after another, from cu_seqlens_k [B + 1] on."""
    more.pop("max_seqlen_k", None)
    counts = cu_seqlens_k.diff()
    lengths = _lengths(counts, cu_seqlens_q)
    order = torch.arange(max([1, *lengths]))
    read = order < counts[:, None]
    slots = torch.where(read, cu_seqlens_k[:-1, None] + order, 0)
    if bool((read & (slots >= len(k))).any()):
        raise _outside(f"row {int(slots.max())} of {len(k)} keys")
    return _attend(q, None, k[slots], v[slots], counts, cu_seqlens_q, max_seqlen_q, **more)


def _outside(detail: str) -> OutOfBounds:
    faults.append(OutOfBounds(detail, kernel="FlashAttention"))
    return faults[-1]


def _lengths(counts: Tensor, cu_seqlens_q: Tensor) -> list[int]:
    """counts [B], of keys, on the host: the kernel needs them nowhere, and torch for the shape of its results."""
    for name, given in (("cache_seqlens", counts), ("cu_seqlens_q", cu_seqlens_q)):
        demand(given.dtype == torch.int32, f"{name} is {given.dtype}, and not torch.int32")
    with own_code():
        lengths: list[int] = counts.tolist()
    demand(len(lengths) == len(cu_seqlens_q) - 1, f"{len(lengths)} lengths for {len(cu_seqlens_q) - 1} sequences")
    return lengths


def _pages(table: Tensor, lengths: list[int], size: int) -> Tensor:
    """table with as many columns as the longest sequence has pages, those past its width from the memory after its rows."""
    table = table[: len(lengths)]
    width = -(-max(lengths, default=0) // size)
    if width <= table.shape[1]:
        return table.long()
    memory = table.as_strided((table.untyped_storage().nbytes() // table.element_size(),), (1,), 0)
    columns = torch.arange(width)
    at: Tensor = int(table.storage_offset()) + torch.arange(len(table))[:, None] * table.stride(0) + columns
    read = columns < torch.tensor([-(-length // size) for length in lengths])[:, None]
    if bool((read & (at >= len(memory))).any()):
        raise _outside(f"column {width - 1} of a page table of {table.shape[1]}")
    return memory[at.clamp_max(len(memory) - 1)].long()


def _attend(
    q: Tensor,
    qv: Tensor | None,
    k: Tensor,
    v: Tensor,
    counts: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    return_softmax_lse: bool = False,
    **more: Any,
) -> Any:
    """k [B, K, G, D], v [B, K, G, C]: the first counts [B] rows of each sequence, anything after them.

    causal        the last query sees the last key, the one before it all but this one, and so on
    window_size   (left, right) keys beside that of a query; -1: all. softcap: scores s become c * tanh(s / c); 0: they stay
    sinks         [H]: a score without a value, which the sum counts
    """
    _refuse_unknown(more)
    heads, groups = q.shape[1], k.shape[2]
    result = q.new_full((len(q), heads, v.shape[-1]), torch.nan) if out is None else out
    sums = torch.full((heads, len(q)), torch.nan)
    if not len(q):
        return (result, sums) if return_softmax_lse else result
    begins, asked = cu_seqlens_q[:-1, None].long(), cu_seqlens_q.diff()[:, None]
    number, column = torch.arange(max_seqlen_q), torch.arange(k.shape[1])
    there = number < asked  # [B, Q]
    at = begins + number
    if bool((there & (at >= len(q))).any()):
        raise _outside(f"query {int(at[there].max())} of {len(q)}")
    at = torch.where(there, at, 0)
    scale = (q.shape[-1] + (0 if qv is None else qv.shape[-1])) ** -0.5 if softmax_scale is None else softmax_scale
    exists = (column < counts[:, None])[:, :, None, None]
    k, v = (torch.where(exists, part, 0).float().permute(0, 2, 3, 1)[:, :, None] for part in (k, v))  # [B, G, 1, D, K]
    scores = (_scores(q[at], k) + (0 if qv is None else _scores(qv[at], v))) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    place = (counts[:, None] - asked + number)[:, :, None]  # of each query among the keys [B, Q, 1]
    seen = exists[:, None, :, 0, 0] & _in_window(place, column, window_size[0], 0 if causal else window_size[1])
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    total = scores.logsumexp(-1, keepdim=True)  # [B, G, H / G, Q, 1]
    if sinks is not None:  # of a sequence without keys no block is computed
        demand(sinks.dtype == torch.bfloat16, f"sinks are {sinks.dtype}, and not torch.bfloat16")
        with_sink = torch.logaddexp(total, sinks.float().view(1, groups, -1, 1, 1))
        total = torch.where(counts.view(-1, 1, 1, 1, 1) > 0, with_sink, total)
    weights = (scores - total).exp().nan_to_num(0.0)
    found = (weights @ v.transpose(-1, -2)).permute(0, 3, 1, 2, 4).flatten(2, 3)  # [B, Q, H, C]
    result[at[there]] = found[there].to(result.dtype)
    sums[:, at[there]] = total[..., 0].flatten(1, 2).transpose(1, 2)[there].T
    return (result, sums) if return_softmax_lse else result


def _scores(queries: Tensor, keys: Tensor) -> Tensor:
    """[B, G, H / G, Q, K]: the products of queries [B, Q, H, D] and keys [B, G, 1, D, K]."""
    groups = keys.shape[1]
    split = queries.float().view(*queries.shape[:2], groups, queries.shape[2] // groups, queries.shape[3])
    products: Tensor = split.permute(0, 2, 3, 1, 4) @ keys
    return products


def _refuse_unknown(more: dict[str, Any]) -> None:
    left = {name: value for name, value in more.items() if name not in _IGNORED}
    if unknown := [name for name, value in left.items() if isinstance(value, Tensor) or value]:
        raise NotImplementedError(f"the stand-in for FlashAttention has no {', '.join(unknown)}")


def _in_window(place: Tensor, key: Tensor, left: int, right: int) -> Tensor:
    after, before = key <= place + right, key >= place - left
    return (after if right >= 0 else torch.ones_like(after)) & (before if left >= 0 else torch.ones_like(before))


def merge_state_v2(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [T, H, C] and sums [T, H] of two parts together: each has its outputs, and the logarithms of its sums."""
    demand_shapes(v_a.shape, v_b)
    demand_shapes(v_a.shape[:2], s_a, s_b)
    total = torch.logaddexp(s_a, s_b)
    parts = ((v, (s - total).exp()[..., None]) for v, s in ((v_a, s_a), (v_b, s_b)))
    merged = sum(torch.where(weight == 0, 0, v.float() * weight) for v, weight in parts)
    return torch.as_tensor(merged).to(v_a.dtype), total


def get_scheduler_metadata(**_: Any) -> Tensor:
    """A plan of blocks, which has no meaning here."""
    return torch.zeros(1, dtype=torch.int32)
