"""DeepSeek-V4's pools, seen from outside: a window's rows, compressed rows, index keys, and what compressors keep.

A row has a slot, as in every pool; a window's slot, which a mapping leads to; and, if a group of `ratio` rows ends with it, the
slot of a compressed row: its own divided by the ratio, since pages are whole groups. Called by taps.py.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.records import GONE, LATENT_POISON, STATE_POISON
from eagletwin.harness.core.trace import on_host

from ..compat.compressed_attention import PLAIN, ROPE, read_rows, stored_parts
from .pools import IndexKeys, Pool


class _Rows:
    """Rows of all layers of one ratio, as FlashMLA reads them."""

    def __init__(self, pool: Any) -> None:
        self.page, self.layers = int(pool.page_size), list(pool.kv_buffer)

    def read(self, layer: int, slots: Tensor) -> Tensor:
        return read_rows(self.layers[layer], slots, self.page)

    def poison(self, slots: Tensor) -> None:
        for layer in self.layers:
            numbers, scales = stored_parts(layer, self.page)
            at = slots // self.page, slots % self.page
            row = torch.full((PLAIN + ROPE,), LATENT_POISON)
            stored = torch.cat(
                [row[:PLAIN].to(torch.float8_e4m3fn).view(torch.uint8), row[PLAIN:].bfloat16().view(torch.uint8)]
            )
            numbers[at] = stored.to(layer.device)
            scales[at] = 127  # the exponent of 1

    @property
    def slots(self) -> Tensor:
        return torch.arange(len(self.layers[0]) * self.page, device=self.layers[0].device)


class CompressedPool(Pool):
    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._ratios = [int(ratio) for ratio in pool.compression_ratios][pool._stage_start : pool._stage_end]
        self._window = _Rows(pool.swa_kv_pool)
        self._compressed = {ratio: _Rows(pool.kv_pools[ratio]) for ratio in {*self._ratios} - {0}}
        self._keys = IndexKeys(pool.index_pools[4]) if 4 in self._ratios else None

    def _mapped(self, slots: Tensor) -> Tensor:
        found: Tensor = self._pool.full_to_swa_index_mapping[slots]
        return found.to(torch.int64)

    def rows(self, slots: Array) -> Array:
        """What is stored in slots [n]: [n, 1, L, 1, W]. Behind the window's row, where the pool compresses, lie the compressed
        row and the index key that end with it: zeros where none does. Of what left the window there is nothing: GONE."""
        at = torch.from_numpy(slots).to(self._window.layers[0].device)
        mapped = self._mapped(at)
        layers = []
        for layer, ratio in enumerate(self._ratios):
            row = self._window.read(layer, mapped)
            row[mapped == 0] = GONE
            layers.append(torch.cat([row, self._behind(layer, ratio, at)], -1))
        return on_host(torch.stack(layers, 1))[:, None, :, None]

    def _behind(self, layer: int, ratio: int, slots: Tensor) -> Tensor:
        if not self._compressed:
            return torch.zeros(len(slots), 0, device=slots.device)
        width = PLAIN + ROPE
        keys = 0 if self._keys is None else int(self._pool.indexer_head_dim)
        found = torch.zeros(len(slots), width + keys, device=slots.device)
        if not ratio:
            return found
        ends = slots % ratio == ratio - 1
        of_ratio = self._ratios[:layer].count(ratio)
        found[ends, :width] = self._compressed[ratio].read(of_ratio, slots[ends] // ratio)
        if ratio == 4 and self._keys is not None:
            keyed = torch.from_numpy(self._keys.rows(on_host(slots[ends] // ratio))).to(slots.device)
            found[ends, width:] = keyed[:, 0, of_ratio, 0]
        return found

    def kept_of(self, row: int, table: Array) -> dict[str, Array]:
        """What compressors keep of the rows of a request that later groups need [n, C], by layer. row: the request's in
        req_to_token; table: the slots of its rows."""
        found = {}
        for layer, ratio in enumerate(self._ratios):
            if not ratio:
                continue
            end = len(table)
            first = max(0, end - end % ratio - (ratio if ratio == 4 else 0))
            parts = [self._pool.compress_state_pools[layer]]
            parts += [self._pool.indexer_compress_state_pools[layer]] if ratio == 4 else []
            kept = []
            for part in parts:
                if ratio == 4:
                    mapped = self._mapped(torch.from_numpy(table[first:]).to(self._window.layers[0].device))
                    places = mapped // part.swa_page_size * part.ring_size + mapped % part.ring_size
                else:
                    places = row * part.ring_size + torch.arange(first, end) % part.ring_size
                buffer = part.kv_score_buffer.kv_score
                kept.append(buffer[places.to(buffer.device)].float())
            found[f"compressor{layer}_state"] = on_host(torch.cat(kept, -1))
        return found

    def _tensors(self) -> list[Tensor]:
        keys = [] if self._keys is None else self._keys.layers
        return [*self._window.layers, *(layer for rows in self._compressed.values() for layer in rows.layers), *keys]

    def copies(self) -> list[Tensor]:
        return [part.clone() for part in self._tensors()]

    def slots_that_differ(self, copies: list[Tensor], first: int) -> Array:
        """Nobody asks: DP attention is not run with such a pool."""
        raise NotImplementedError

    def poison_all(self) -> None:
        for rows in (self._window, *self._compressed.values()):
            rows.poison(rows.slots)
        if self._keys is not None:
            self._keys.poison_all()
        for part in (*self._pool.compress_state_pools, *self._pool.indexer_compress_state_pools):
            if part is not None:
                part.kv_score_buffer.kv_score[:-1] = STATE_POISON  # the last row is what an engine reads of no row

    def poison(self, freed: Array, used: Array) -> None:
        """See Pool.poison. What compressors keep is poisoned before a case alone."""
        device = self._window.layers[0].device
        mapped = self._mapped(torch.from_numpy(used).to(device))
        free = torch.ones(len(self._window.slots), dtype=torch.bool, device=device)
        free[mapped] = False
        free[: self._window.page] = False  # of padding
        self._window.poison(free.nonzero()[:, 0])
        of_groups = {ratio: torch.from_numpy(np.unique(freed // ratio)).to(device) for ratio in self._compressed}
        for ratio, rows in self._compressed.items():
            rows.poison(of_groups[ratio])
        if self._keys is not None:
            self._keys.poison(of_groups[4])


def pool_of(pool: Any) -> Pool:
    return CompressedPool(pool) if hasattr(pool, "compression_ratios") else Pool(pool)
