"""Prefix hits that were missed: `radix.hit`. Called by requests.py.

A request that is prefilled begins behind the longest prefix of its tokens that the prefix cache has when its batch begins
(cache_rows.py). A cache that misses a hit gives right answers, slowly: no other rule can see it.
"""

from eagletwin.harness.core.records import Record
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.families import RECIPES

from .cache_rows import CacheRows, tokens_at_lookup
from .compare import Compare, Place
from .model import Model
from .sessions import Sessions
from .story import Story
from .tracked import TrackedStates

_RULE = "radix.hit"


class Hits:
    """Knows which slots were the prefix cache's when the batch began."""

    def __init__(
        self,
        trace: Trace,
        stories: dict[str, Story],
        compare: Compare,
        model: Model,
        rows: CacheRows,
        tracked: TrackedStates,
        sessions: Sessions,
    ) -> None:
        self._trace, self._stories, self._compare = trace, stories, compare
        self._rows, self._tracked, self._sessions = rows, tracked, sessions
        self._page = trace.header.case.page_size
        self._states = set[int]()  # slots of states that the cache had when the batch began
        self._back = RECIPES[trace.header.case.model].window if model.numbers else 0
        self._restored: set[int] = set()  # slots whose rows came back from the host since the last batch
        self._cached: dict[int, bool] = {}  # slot -> whether layers with a window have its row, too
        self._ends: dict[str, int] = {}  # request -> where its last chunk ended

    def batch(self, number: int, record: Record) -> None:
        """A batch begins."""
        if not self._rows.on:
            return
        slots = self._trace.integers(number, "cached")
        live = self._trace.integers(number, "window_cached") if "window_cached" in record.tensors else [1] * len(slots)
        # what one request of the batch had brought back was not there yet when others were looked up
        fresh, self._restored = self._restored, set()
        self._states = set(self._trace.integers(number, "state_cached")) if self._tracked.on else set()
        self._cached = {slot: led > 0 for slot, led in zip(slots, live, strict=True) if slot not in fresh}

    def copied(self, pairs: list[tuple[int, int]], restore: bool) -> None:
        """Rows of these (slot of the device, slot of the host) went to the host, or came back."""
        if restore:
            self._restored |= {device for device, _ in pairs}

    def prefill(self, number: int, record: Record) -> None:
        """A chunk is over. If it was the first since the request was queued, it began where its hit ended."""
        before, start = self._ends.get(record.request), record.numbers["start"]
        self._ends[record.request] = record.numbers["end"]
        own = self._sessions.goes_on(record.request)
        if self._rows.on and start != before and not own and self._compare.on(_RULE):
            known = tokens_at_lookup(self._stories[record.request], number, record)
            longest = self._longest(record.request, known)
            if start < longest:
                why = f"So many of its {known} tokens have their rows in the prefix cache."
                place = Place(record, "target.extend", step=-1)
                self._compare.report(place, _RULE, "first row to be prefilled", longest, start, why)

    def _longest(self, name: str, known: int) -> int:
        """Rows of the longest prefix that can be reused, of a request with so many tokens: of those that are looked up, with
        the rows that its next row sees in a window."""
        story = self._stories[name]
        stored, ends = self._rows.of(story, known, self._cached), self._tracked.ends(story.tokens[:known], self._states)
        most = min(stored.count, self._rows.looked_up(name, known)) // self._page * self._page
        for end in range(most, 0, -self._page):
            if self._tracked.on and end not in ends:  # where layers keep states a hit ends where the cache has one
                continue
            if stored.live.issuperset(range(max(0, end - self._back), end)):
                return end
        return 0
