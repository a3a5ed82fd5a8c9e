"""Which rows the prefix cache has of a sequence of tokens, by its slots. Used by hits.py and kept.py.

What is in a slot is known by the request that last committed a row there: row i is that of another request if all tokens that
it is a function of are the same, and its target is.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from eagletwin.harness.core.case import Request
from eagletwin.harness.core.records import Record
from eagletwin.harness.core.trace import Trace

from .host_rows import carry, pairs_of
from .model import Model
from .story import Story

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


def tokens_at_lookup(story: Story, number: int, record: Record) -> int:
    """How many tokens the request of this prefill record had when it was looked up: all that are known but the one that its
    last chunk gave."""
    return story.known[number] + (not record.numbers["final"])


class CacheRows:
    """Knows which row lies in which slot. on: whether that is asked, as there is a cache"""

    def __init__(self, trace: Trace, stories: Mapping[str, Story], model: Model) -> None:
        self._trace, self._stories, self._ahead = trace, stories, model.ahead
        self.on = model.numbers and trace.header.case.engine.sglang.radix_cache
        self._from = {request.id: _first_logits(request) for request in trace.header.case.requests}
        self._committed: dict[int, tuple[str, int]] = {}  # slot -> request and row
        self._on_host: dict[int, tuple[str, int]] = {}

    def looked_up(self, name: str, known: int) -> int:
        """Rows that SGLang looks up of a request with so many tokens: not that of the last one, whose logits are wanted, nor
        those behind the first whose logprob is asked for; and where keys are pairs of tokens there is one less."""
        asked = self._from[name]
        return max(0, min(known - 1, known if asked is None else asked) - self._ahead)

    def copied(self, number: int, record: Record) -> list[tuple[int, int]]:
        """Rows went to the host, or came back: (slot of the device, slot of the host) of each."""
        pairs = pairs_of(self._trace, number)
        carry(pairs, bool(record.numbers["restore"]), self._committed, self._on_host)
        return pairs

    def committed(self, number: int, record: Record) -> None:
        """A prefill or a round is over: its rows are the request's tokens'."""
        for row, slot in enumerate(self._trace.integers(number, "table") if self.on else ()):
            self._committed[slot] = record.request, row

    def of(self, story: Story, count: int, cached: Mapping[int, bool], host: Iterable[int] = ()) -> CachedPrefix:
        """Of the first `count` tokens of a request, with these slots in the cache. cached: slot -> whether layers with a window
        have its row, too; host: slots of the host's memory. Their rows are of no layer with a window until they come back. A
        row is no other target's: rows of requests with another adapter are none of it."""
        tokens = story.tokens[:count]
        alike = {
            name: _alike(other.tokens, tokens) if other.adapter == story.adapter else 0 for name, other in self._stories.items()
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
    return next(
        (n for n, (one, other) in enumerate(zip(some, others, strict=False)) if one != other), min(len(some), len(others))
    )


def _first_logits(request: Request) -> int | None:
    """The first row whose logits a request wants for its logprobs; None: no row but the last."""
    wanted = request.logprobs
    if wanted is None or (wanted.start < 0 and wanted.tokens):
        return None
    return len(request.prompt) if wanted.start < 0 else wanted.start
