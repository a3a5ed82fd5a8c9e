"""KV rows that move: an accepted path to the front of its block, in MHA pools, MLA pools and the DSA indexer's cache."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from eagletwin.reference.tree import Move, accept_row, kv_moves, move_rows

from ..release import EAGLE, INDEX, LOCS, MOVE, POOLS, SPEC, load
from ..tier import Property, fault, holds_for, same
from ..trees import Batch, batches

SLOTS, PAGE = 64, 4


@dataclass(frozen=True)
class AcceptedBatch:
    """A verified batch whose nodes lie in any slots of the pool but 0, which takes padding."""

    batch: Batch
    layers: int = 2
    chunk: int = 256  # how many rows SGLang moves in one launch
    native: bool = False

    @property
    def slots(self) -> list[list[int]]:
        """[bs][nodes]"""
        nodes = self.batch.nodes
        free = Random(self.batch.seed).sample(range(1, SLOTS), len(self.batch.trees) * nodes)
        return [free[start : start + nodes] for start in range(0, len(free), nodes)]

    @property
    def moves(self) -> list[Move]:
        return [move for path, slots in zip(self.batch.paths, self.slots, strict=True) for move in kv_moves(path, slots)]


@cache
def mha_pool(layers: int) -> Any:
    """Keys of 3 * 8 floats a row, which no tile divides, and values of 3 * 4."""
    shape = {"head_num": 3, "head_dim": 8, "v_head_dim": 4, "layer_num": layers}
    pool = load(POOLS).MHATokenToKVPool(SLOTS, PAGE, torch.float32, **shape, device="cpu", enable_memory_saver=False)
    with reachable(pool):
        pool._init_kv_copy_and_warmup()
    return pool


@cache
def mla_pool() -> Any:
    shape = {"kv_lora_rank": 6, "qk_rope_head_dim": 2, "layer_num": 2}
    return load(POOLS).MLATokenToKVPool(SLOTS, PAGE, torch.float32, **shape, device="cpu", enable_memory_saver=False)


@cache
def dsa_pool() -> Any:
    """Two pages of 64 tokens and the padding page; the middle layer keeps no index."""
    return load(POOLS).DSATokenToKVPool(
        *(128, 64, 6, torch.float32, 2, 3, "cpu", 128, False, 8),
        index_buf_size=128,
        skip_topk_layers=[False, True, False],
    )


@contextmanager
def reachable(pool: Any) -> Iterator[None]:
    """The pool's rows are what raw addresses may reach; they hold numbers that are all different."""
    from ..runtime import LIVE

    buffers = [*(pool.k_buffer or ()), *(pool.v_buffer or ())]
    for number, buffer in enumerate(buffers):
        buffer.copy_(torch.arange(buffer.numel()).reshape(buffer.shape) + 100_000 * number)
        LIVE.register(f"buffer {number}", buffer)
    try:
        yield
    finally:
        for number in range(len(buffers)):
            LIVE.forget(f"buffer {number}")


def accept(case: AcceptedBatch, pool: Any) -> None:
    """SGLang's whole way from accept_index to the pool."""
    batch, width = case.batch, case.batch.num_steps + 1
    rows = [accept_row(path, first * batch.nodes, width) for first, path in enumerate(case.batch.paths)]
    slots = torch.tensor([slot for request in case.slots for slot in request], dtype=torch.int64)
    load(SPEC).move_accept_tokens_to_target_kvcache(
        SimpleNamespace(seq_lens=torch.tensor(batch.lengths, dtype=torch.int64), out_cache_loc=slots),
        torch.tensor(rows, dtype=torch.int32).reshape(len(rows), width),
        torch.tensor([len(path) - 1 for path in case.batch.paths], dtype=torch.int32),
        SimpleNamespace(get_kvcache=lambda: pool),
    )


TILED = f"{MOVE}.copy_all_layer_kv_cache_tiled"
MHA, MLA, DSA = (f"{POOLS}.{name}" for name in ("MHATokenToKVPool", "MLATokenToKVPool", "DSATokenToKVPool"))


@holds_for(
    st.builds(AcceptedBatch, batches(least=1), st.integers(1, 3), st.sampled_from([4, 256]), st.just(False)),
    fault(TILED, "tgt[:, None] * stride", "src[:, None] * stride"),
    fault(f"{MHA}._move_kv_cache_impl", "src_loc[start:end],", "src_loc[:chunk_len],"),
    fault(f"{EAGLE}.fill_accept_out_cache_loc", "if src > -1:", "if src > 0:"),
    fault(f"{LOCS}.fill_front_out_cache_loc_func", "torch.zeros_like(num_front)", "num_front // num_front"),
    fault(f"{SPEC}.move_accept_tokens_to_target_kvcache", "num_correct_drafts + 1,", "num_correct_drafts,"),
    named="path moves in MHA pool",
)
def path_moves_in_mha_pool(case: AcceptedBatch) -> None:
    pool = mha_pool(case.layers)
    if pool._kv_copy_config is not None:
        pool._kv_copy_config["num_locs_upper"] = case.chunk
    pool.use_native_move_kv_cache = case.native
    with reachable(pool):
        before = [buffer.clone() for buffer in [*pool.k_buffer, *pool.v_buffer]]
        accept(case, pool)
        for old, new in zip(before, [*pool.k_buffer, *pool.v_buffer], strict=True):
            same("rows of the pool", new, move_rows(old, case.moves))


path_moves_in_mha_pool_by_indexing = Property(
    st.builds(AcceptedBatch, batches(least=1), native=st.just(True)),
    path_moves_in_mha_pool.holds,
    (fault(f"{POOLS}.move_kv_cache_native", "v_cache[src_loc_flat]", "v_cache[tgt_loc_flat]"),),
    named="path moves in MHA pool by indexing",
)


@holds_for(
    st.builds(AcceptedBatch, batches(least=1)),
    fault(f"{MLA}.move_kv_cache", "kv_cache[src_loc_flat]", "kv_cache[tgt_loc_flat]"),
    named="path moves in MLA pool",
)
def path_moves_in_mla_pool(case: AcceptedBatch) -> None:
    pool = mla_pool()
    for number, buffer in enumerate(pool.kv_buffer):
        buffer.copy_(torch.arange(buffer.numel()).reshape(buffer.shape) + 100_000 * number)
    before = [buffer.clone() for buffer in pool.kv_buffer]
    accept(case, pool)
    for old, new in zip(before, pool.kv_buffer, strict=True):
        same("rows of the pool", new, move_rows(old, case.moves))


def index_of_tokens(buffer: Tensor) -> tuple[Tensor, Tensor]:
    """(keys [tokens, 128], scales [tokens, 4]) in bytes of an indexer cache [pages, 64 * 132]: a page holds the keys of its 64
    tokens, one after the other, and behind them all their scales."""
    keys, scales = buffer[:, : 64 * 128], buffer[:, 64 * 128 :]
    return keys.reshape(-1, 128), scales.reshape(-1, 4)


@dataclass(frozen=True)
class Moves:
    """Rows to other rows of a DSA pool, within its pages and across them, in any order."""

    count: int
    seed: int

    @property
    def moves(self) -> list[Move]:
        random = Random(self.seed)
        return list(zip(random.sample(range(192), self.count), random.sample(range(192), self.count), strict=True))


@holds_for(
    st.builds(Moves, st.integers(0, 12), st.integers(0, 999)),
    fault(f"{DSA}.move_kv_cache", "self.index_key_cache.move(tgt_loc, src_loc)", "pass"),
    fault(f"{INDEX}.IndexKeyCache.move", "scales[src_page, src_offset]", "scales[src_page, tgt_offset]"),
    named="rows move in DSA pool",
)
def rows_move_in_dsa_pool(case: Moves) -> None:
    """Targets may be sources of others: all is read before anything is written."""
    pool, random = dsa_pool(), torch.Generator().manual_seed(case.seed)
    for buffer in pool.index_key_cache.buffer:
        buffer.copy_(torch.randint(0, 256, buffer.shape, generator=random))
    for buffer in pool.kv_buffer:
        buffer.copy_(torch.arange(buffer.numel()).reshape(buffer.shape))
    index, latent = ([b.clone() for b in buffers] for buffers in (pool.index_key_cache.buffer, pool.kv_buffer))
    sources, targets = (torch.tensor([move[end] for move in case.moves], dtype=torch.int64) for end in (0, 1))
    pool.move_kv_cache(targets, sources)
    for old, new in zip(latent, pool.kv_buffer, strict=True):
        same("rows of the pool", new, move_rows(old, case.moves))
    for layer, (old, new) in enumerate(zip(index, pool.index_key_cache.buffer, strict=True)):
        same(f"pages of layer {layer}'s index", old.shape[0], 0 if layer == 1 else 3)
        for before, after in zip(index_of_tokens(old), index_of_tokens(new), strict=True):
            same(f"index of layer {layer}", after, move_rows(before, case.moves) if len(before) else before)
