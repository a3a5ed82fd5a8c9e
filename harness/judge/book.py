"""Which row was last fed to each slot of each layer of a multi-layer draft. Written and read by layers.py.

Slots are those that the draft's rows lie in: of layers with a window, the window's. The prefix cache may have a slot of the
request's lead to another request's row of the window, which came later.

A row that was fed a draft is never fed again by a worker that does not repair it, so what a slot holds depends on the order in
which the extends ran.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from eagletwin.reference.eagle import DraftRows, Head

from .host_rows import carry


class Book:
    """parts: what a trace calls the layers; heads: the reference's, in the same order.

    of_record  (record, part) -> keys and values [L, G, D] of the record's slots, as the book had them at that record; None: of
               a slot that was never written
    """

    def __init__(self, parts: Sequence[str], heads: Sequence[Head]) -> None:
        self._parts, self._heads = parts, heads
        self._slots: list[dict[int, tuple[Tensor, Tensor]]] = [{} for _ in heads]  # slot -> keys, values [L, G, D]
        self._on_host: list[dict[int, tuple[Tensor, Tensor]]] = [{} for _ in heads]
        self.of_record: dict[tuple[int, str], list[tuple[Tensor, Tensor] | None]] = {}

    def write(self, slots: Sequence[tuple[int, int]], rows: range, layers: Sequence[DraftRows]) -> None:
        """An extend wrote these (row, slot) of `rows`; layers: what each layer computed for all of them."""
        for book, layer in zip(self._slots, layers, strict=True):
            for row, slot in slots:
                n = row - rows.start
                book[slot] = layer.keys[:, n], layer.values[:, n]

    def copied(self, pairs: list[tuple[int, int]], restore: bool) -> None:
        """Rows of these (slot of the device, slot of the host) went to the host, or came back."""
        for book, host in zip(self._slots, self._on_host, strict=True):
            carry(pairs, restore, book, host)

    def look_up(self, number: int, slots: Sequence[Sequence[int]]) -> None:
        """Keep what the book has now of the slots of each layer, for record `number`: others write them again later."""
        for part, book, listed in zip(self._parts, self._slots, slots, strict=True):
            self.of_record[number, part] = [book.get(slot) for slot in listed]

    def rows(self, slots: Sequence[int]) -> list[DraftRows | None]:
        """The stored rows in these slots, of each layer. One that was never written is of zeros: reading it is reported."""
        if not slots:
            return [None] * len(self._heads)
        of_layers: list[DraftRows | None] = []
        for book, head in zip(self._slots, self._heads, strict=True):
            shape = head.shape
            nothing = torch.zeros(shape.num_layers, shape.num_kv_heads, shape.head_dim, dtype=torch.float64)
            rows = [book.get(slot, (nothing, nothing)) for slot in slots]
            keys, values = (torch.stack(parts, 1) for parts in zip(*rows, strict=True))
            of_layers.append(DraftRows(torch.empty(0), torch.empty(0), keys, values))
        return of_layers
