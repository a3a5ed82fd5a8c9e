"""Which token each stored row of each layer of a multi-layer draft consumed when it was last fed. Written by layers.py.

A request that takes rows over from the prefix cache takes over what they consumed. A key of the cache is a pair of neighbouring
tokens, so where a request took over n rows in a row that another had fed, x[0..n] is the same in both: each of them that
consumed one of these tokens must have consumed this request's. Later tokens are beyond the key. What the last rows of the
layers above the first consumed of the other request's stays; SGLang accepts that (boundary-kv), as it does a row that was fed a
draft and never repaired.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from eagletwin.reference.mtp import is_provisional

from .host_rows import carry


@dataclass(frozen=True, slots=True)
class Reused:
    """The first rows of one layer, which were there already: what they must have consumed, and what they did. Both are alike
    for a row of which that is not known."""

    layer: int
    expected: list[int]
    consumed: list[int]


class FedTokens:
    """By layer: slot -> the token that its row consumed; slots whose row was fed a draft are left out."""

    def __init__(self, layers: int) -> None:
        self._tokens: list[dict[int, int]] = [{} for _ in range(layers)]
        self._feeder: dict[int, str] = {}  # slot -> the request that fed it
        self._on_host: list[dict[int, int]] = [{} for _ in range(layers)]
        self._feeder_on_host: dict[int, str] = {}

    def copied(self, pairs: list[tuple[int, int]], restore: bool) -> None:
        """Rows of these (slot of the device, slot of the host) went to the host, or came back."""
        for tokens, host in zip(self._tokens, self._on_host, strict=True):
            carry(pairs, restore, tokens, host)
        carry(pairs, restore, self._feeder, self._feeder_on_host)

    def write(self, request: str, layer: int, rows: range, slots: Sequence[int], consumed: Sequence[int], known: int) -> None:
        """An extend of a request fed these rows, when x[0..known] was known."""
        for row, slot, token in zip(rows, slots, consumed, strict=False):  # a last round has rows without a slot
            if slot == 0:  # it has left the window
                continue
            self._feeder[slot] = request
            if is_provisional(row, layer, known):
                self._tokens[layer].pop(slot, None)
            else:
                self._tokens[layer][slot] = token

    def reused(self, table: Sequence[int], count: int, tokens: Sequence[int]) -> list[Reused]:
        """The first `count` rows of a request whose tokens these are."""
        ends = self._ends(table[:count])
        found = []
        for layer, fed in enumerate(self._tokens):
            expected, consumed = list[int](), list[int]()
            for row, end in enumerate(ends[: max(0, count - layer)]):
                token = tokens[row + 1 + layer]
                expected.append(token)
                consumed.append(fed.get(table[row], token) if row + 1 + layer <= end else token)
            found.append(Reused(layer, expected, consumed))
        return found

    def _ends(self, slots: Sequence[int]) -> list[int]:
        """Of each row, where the run of rows ends that its feeder fed."""
        ends, end = [0] * len(slots), len(slots)
        for row in reversed(range(len(slots))):
            if row + 1 < len(slots) and self._feeder.get(slots[row]) != self._feeder.get(slots[row + 1]):
                end = row + 1
            ends[row] = end
        return ends
