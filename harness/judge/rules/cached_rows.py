"""Whose rows the prefix cache has in which slot, on the device and on the host; the rules of prefix_cache.py start from it."""

from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TypeVar

from eagletwin.harness.core.case import Request
from eagletwin.harness.core.records import Record
from eagletwin.harness.core.trace import Trace

from ..compare import Place
from ..context import Rules
from ..replay import RequestReplay
from . import stages

# What was copied between the device and a hierarchical cache's pools on the host: whose rows are in which slot afterwards.
#
# A copy's record has the slots that the prefix cache's tree has for both ends. What the device's slots held when it was asked
# for is what the host's must hold, and the other way round: whatever the copy itself did. Rows that it left out, or took to
# other slots, are then other rows than are known to be there.

_What = TypeVar("_What")


def pairs_of(trace: Trace, number: int, prefix: str = "") -> list[tuple[int, int]]:
    """(slot of the device, slot of the host) of a copy; nothing of a space of slots that it does not touch.

    prefix: of the names of the space's tensors"""
    if f"{prefix}device" not in trace.header.records[number].tensors:
        return []
    return list(zip(*(trace.integers(number, f"{prefix}{end}") for end in ("device", "host")), strict=True))


def carry(
    pairs: list[tuple[int, int]], restore: bool, device: MutableMapping[int, _What], host: MutableMapping[int, _What]
) -> None:
    """Take what is known of the slots at one end to those at the other. Of one of which nothing is known, nothing is left."""
    for at_device, at_host in pairs:
        origin, target, source, slot = (host, device, at_host, at_device) if restore else (device, host, at_device, at_host)
        if source in origin:
            target[slot] = origin[source]
        else:
            target.pop(slot, None)


def restored_rows(trace: Trace) -> dict[tuple[str, int], int | None]:
    """(request, iteration) -> how many of its rows came back from the host. None: so did rows that layers with a window lacked,
    and the engine counts all rows as the host's that were of no use without those, where they are on the device, too."""
    found: dict[tuple[str, int], int | None] = {}
    for number, record in enumerate(trace.header.records):
        if record.stage == "copy" and record.numbers["restore"]:
            key, count = (record.request, record.iteration), len(trace.array(number, "device"))
            before = found.get(key, 0)
            found[key] = None if before is None or "window_device" in record.tensors else before + count
    return found


# Which rows the prefix cache has of a sequence of tokens, by its slots.
#
# What is in a slot is known by the request that last committed a row there: row i is that of another request if all tokens that
# it is a function of are the same, and its target is.

_NOBODY = ("", 0)  # has the row in a slot of which nothing is known


@dataclass(slots=True)
class CachedPrefix:
    """Rows of the cache that are those of a sequence.

    rows  of its prefixes; live: those of them that layers with a window have, too
    """

    rows: set[int] = field(default_factory=set)
    live: set[int] = field(default_factory=set)

    @property
    def count(self) -> int:
        """How many there are from the first on without a gap."""
        return next(row for row in range(len(self.rows) + 1) if row not in self.rows)


def tokens_at_lookup(replay: RequestReplay, number: int, record: Record) -> int:
    """How many tokens the request of this prefill record had when it was looked up: all that are known but the one that its
    last chunk gave."""
    return replay.known[number] + (not record.numbers["final"])


class CacheRows(Rules):
    """Knows which row lies in which slot. on: whether that is asked, as there is a cache"""

    def begin(self) -> None:
        self._ahead = self._model.ahead
        self.on = self._model.numbers and self._case.prefix_cache
        self._from = {request.id: _first_logits(request) for request in self._case.requests}
        self._committed: dict[int, tuple[str, int]] = {}  # slot -> request and row
        self._on_host: dict[int, tuple[str, int]] = {}
        self._emitted: dict[str, int] = {}  # request -> how many tokens were emitted for it

    @stages("finished")
    def note_finished(self, number: int, record: Record) -> None:
        self._emitted[record.request] = len(self._trace.integers(number, "tokens"))

    @stages("cached")
    def cached(self, number: int, record: Record) -> None:
        """Which tokens the rows in the cache are of: a part of `draft.kv` (stored.py)."""
        replay, tokens = self._replay(record), self._trace.integers(number, "tokens")
        # what was emitted is in it; what a last round committed past the end may be
        least = len(replay.prompt) + self._emitted.get(record.request, 0)
        path = replay.tokens[: max(least, len(tokens))]
        self._compare.integers(Place(record, "finished"), "draft.kv", path, tokens, "token of the cached path", 0)

    def looked_up(self, name: str, known: int) -> int:
        """Rows that are looked up of a request with so many tokens: not that of the last one, whose logits are wanted, nor
        those behind the first whose logprob is asked for; and where keys are pairs of tokens there is one less."""
        asked = self._from[name]
        return max(0, min(known - 1, known if asked is None else asked) - self._ahead * self._engine.pairs)

    @stages("copy")
    def note_copied(self, number: int, record: Record) -> None:
        carry(pairs_of(self._trace, number), bool(record.numbers["restore"]), self._committed, self._on_host)

    @stages("prefill", "extend")
    def note_committed(self, number: int, record: Record) -> None:
        """A prefill or a round is over: its rows are the request's tokens'."""
        for row, slot in enumerate(self._trace.integers(number, "table") if self.on else ()):
            self._committed[slot] = record.request, row

    def of(self, replay: RequestReplay, count: int, cached: Mapping[int, bool], host: Iterable[int] = ()) -> CachedPrefix:
        """Of the first `count` tokens of a request, with these slots in the cache. cached: slot -> whether layers with a window
        have its row, too; host: slots of the host's memory. Their rows are of no layer with a window until they come back. A
        row is no other target's: rows of requests with another adapter are none of it."""
        tokens = replay.tokens[:count]
        alike = {
            name: _alike(other.tokens, tokens) if other.adapter == replay.adapter else 0
            for name, other in self._replays.items()
        }
        found = CachedPrefix()
        held = [(*self._committed.get(slot, _NOBODY), live) for slot, live in cached.items()]
        for owner, row, live in (*held, *((*self._on_host.get(slot, _NOBODY), False) for slot in host)):
            if owner and row + self._ahead < alike[owner]:
                found.rows.add(row)
                if live:
                    found.live.add(row)
        return found


def _alike(some: list[int], others: list[int]) -> int:
    """How many tokens two sequences begin with alike."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(some, others, strict=False)))


def _first_logits(request: Request) -> int | None:
    """The first row whose logits a request wants for its logprobs; None: no row but the last."""
    wanted = request.logprobs
    if wanted is None or (wanted.start < 0 and wanted.tokens):
        return None
    return len(request.prompt) if wanted.start < 0 else wanted.start
