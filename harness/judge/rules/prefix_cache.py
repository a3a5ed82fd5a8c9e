"""The prefix cache: which rows it does not keep (`radix.kept`), and which hits were missed (`radix.hit`)."""

from dataclasses import dataclass

from eagletwin.harness.core.records import Record
from eagletwin.harness.families import RECIPES

from ..compare import Place
from ..context import Rules
from ..request_logits import end_of
from . import rule, stages
from .cached_rows import CacheRows, pairs_of, tokens_at_lookup
from .sessions import Sessions
from .states import TrackedStates

# Rows that the prefix cache does not keep: `radix.kept`.
#
# What a chunk or a prompt leaves is put into the cache when its batch is over, locked as long as the request runs, and what a
# request has when it ends is put there at its end. A cache that keeps less gives right
# answers, and later requests are slower: `radix.hit` compares a hit with what the cache has, and does not see it.
#
# The engine promises whole pages of keys. With hidden states a key is a pair of tokens, and n rows have n - 1 of them whole. Of
# a request that ends it promises the rows whose tokens it was sent: not those that its last round committed behind its end, nor
# that of a mixed step in which it ended, whose count of committed rows the engine does not raise then. Where the request's
# grammar ends a round, the engine counts a round of the tokens up to there, the last of which has no row then. It promises
# nothing of one that is aborted, and of one that is retracted nothing but what may be evicted at once. The end of a request is
# seen when an iteration begins, but for one whose result is looked at before a retraction by an event (with overlap): what the
# cache has then is recorded, as the retraction and the next batch may evict it at once. Rows of a streaming session are the
# session's (sessions.py). Where layers keep states, what is promised ends where the cache has a state: states.py. An engine
# may give its cache the blocks of known tokens when it schedules a step: those that a request's last round completes never get
# there.

_KEPT_RULE = "radix.kept"


@dataclass(frozen=True, slots=True)
class _Step:
    """A prefill or a round that gave a request tokens.

    rows  that the engine counts as committed when it is over, should the request end with it
    sent  tokens that the request then has, prompt included
    most  rows that the cache is given then, whatever there is
    """

    rows: int
    sent: int
    most: int


class KeptRows(Rules):
    """Knows what is promised of each request, and the slots of the prefix cache when the iteration and the batch began."""

    def begin(self) -> None:
        header, model = self._trace.header, self._model
        self._rows, self._sessions = self._context.of(CacheRows), self._context.of(Sessions)
        # older traces of windows do not say what the cache had when a request was looked up: completeness.py
        told = not model.windows or any(record.stage == "looked_up" for record in header.records)
        self._on = self._rows.on and told and not model.keeping
        self._page, self._ahead = header.case.page_size, model.ahead
        # with overlap the result of a prefill is looked at when the request's first round, or mixed step, has begun
        self._late = header.engine.overlap
        # iterations whose events retract what runs, and have the engine look at what is under way
        self._retractions = {event.at for event in header.case.events if event.kind == "retract" and self._late}
        self._iteration: dict[int, bool] = {}
        self._batch: dict[int, bool] = {}
        self._chunk: dict[str, tuple[int, int]] = {}  # request -> where its last chunk ended, and the rows that are kept of it
        # request that was looked up since its last chunk -> rows of it that the cache had then
        self._reach: dict[str, int] = {}
        self._branch: dict[str, int] = {}  # request -> where its prefix parts from what is whole in the cache (_put)
        self._fresh: set[str] = set()  # requests without a round or a mixed step since their last prefill
        self._steps: dict[str, list[_Step]] = {}
        # request -> iteration in which a result was looked at before a retraction, and rows of it that the cache had then
        self._read: dict[str, tuple[int, int]] = {}
        self._grammars = {request.id: request.grammar for request in header.case.requests}

    @stages("iteration")
    def iteration(self, number: int, _record: Record) -> None:
        """An iteration begins: all that ended before it is over."""
        if self._on:
            self._iteration = dict.fromkeys(self._trace.integers(number, "cached"), True)

    @stages("batch")
    def batch(self, number: int, _record: Record) -> None:
        if self._on:
            self._batch = dict.fromkeys(self._trace.integers(number, "cached"), True)

    @stages("looked_up")
    def looked_up(self, number: int, record: Record) -> None:
        """A request was looked up, on the device and the host. What is in a slot is known now: the batch that it goes into may
        be given slots of rows that are evicted for it."""
        if self._on:
            replay, cached = self._replays[record.request], dict.fromkeys(self._trace.integers(number, "cached"), True)
            found = self._rows.of(replay, len(replay.tokens), cached, self._trace.integers(number, "host"))
            self._reach[record.request] = found.count

    @stages("read")
    def read(self, number: int, record: Record) -> None:
        """A result was looked at before a retraction. Who ended with it is said when the next iteration begins; by then their
        rows may be evicted, and their slots another request's."""
        if not self._on:
            return
        cached = dict.fromkeys(self._trace.integers(number, "cached"), True)
        for name in self._steps:
            replay = self._replays[name]
            self._read[name] = record.iteration, self._rows.of(replay, len(replay.tokens), cached).count

    @rule("radix.kept", "4", weights="no", also=("extend", "finished"))
    @stages("prefill")
    def prefill(self, number: int, record: Record) -> None:
        """The prefix cache has the rows that a chunk or a prompt left, in whole pages, as long as its request runs, and those
        of the tokens that a request was sent when it ends."""
        if not self._is_promised(record):
            return
        name, start, end = record.request, record.numbers["start"], record.numbers["end"]
        if "mixed" in record.numbers:
            self._goes_on(record)
            self._steps.setdefault(name, []).append(_Step(start, end + 1, start))
            return
        before, _ = self._chunk.get(name, (None, 0))
        # one that is back from a retraction may begin where its last chunk had ended, too
        if before == start and name in self._fresh and name not in self._reach:
            self._live(record)
        else:
            self._branch[name] = self._parting(name, tokens_at_lookup(self._replays[name], number, record), start)
        self._fresh.add(name)
        kept = self._put(name, end)
        self._chunk[name] = end, kept
        if record.numbers["final"]:  # a retraction throws away rounds under way
            steps = self._steps.get(name, [])
            self._steps[name] = [*(step for step in steps if step.sent <= end), _Step(end, end + 1, kept)]

    def _is_promised(self, record: Record) -> bool:
        """Whether the prefix cache is promised rows of this request: not of one whose rows a session keeps."""
        return self._on and not self._sessions.keeps_rows_of(record.request)

    def _parting(self, name: str, known: int, start: int) -> int:
        """Rows of the longest prefix of a request with so many tokens that the cache had when it was looked up, but for what a
        window sees: it ends behind the hit, at `start`. 0: it does not."""
        rows = min(self._reach.pop(name, 0), self._rows.looked_up(name, known)) // self._page * self._page
        return rows if rows > start else 0

    def _put(self, name: str, end: int) -> int:
        """Rows that the cache is given when a chunk ends there. The engine first gives it the window's rows of a prefix that it
        has otherwise, and no others with them."""
        branch = self._branch.get(name, 0)
        if 0 < branch <= end - self._ahead:
            self._branch[name] = 0
            return branch
        return self._whole(end)

    @stages("extend")
    def round(self, _number: int, record: Record) -> None:
        if not self._is_promised(record):
            return
        name, end = record.request, record.numbers["seq_len"]
        self._goes_on(record)
        kept = end if self._engine.keeps_last else self._whole(self._round(record).committed)
        self._steps.setdefault(name, []).append(_Step(end, end + 1, kept))

    @stages("finished")
    def note_finished(self, number: int, record: Record) -> None:
        name = record.request
        tokens = self._trace.integers(number, "tokens")
        sent = len(self._replays[name].prompt) + len(tokens)
        last = next((step for step in self._steps.get(name, []) if step.sent >= sent), None)
        if not self._is_promised(record) or record.numbers["aborted"] or last is None:
            return
        why = f"It ended with {sent} tokens, and {last.rows} rows were committed."
        grammar = self._grammars[name]
        over = grammar is not None and end_of(grammar, tokens) is not None
        promised = min(self._whole(min(last.rows, sent - over)), last.most)
        before, (read, count) = record.iteration - 1, self._read.get(name, (None, 0))
        if read == before:
            self._enough(Place(record, "finished"), promised, count, why)
        elif before not in self._retractions:  # else the trace is an older one, and lacks the record: completeness.py
            self._there(Place(record, "finished"), promised, self._iteration, why)

    def _goes_on(self, record: Record) -> None:
        """A request that runs was given tokens, by a round or a mixed step."""
        if not self._late or record.request not in self._fresh:
            self._live(record)
        self._fresh.discard(record.request)

    def _live(self, record: Record) -> None:
        """What was put into the cache of a request that runs is locked."""
        end, kept = self._chunk.get(record.request, (0, 0))
        why = f"Its last chunk ended at {end}, and it runs."
        self._there(Place(record, "iteration"), kept, self._batch, why)

    def _there(self, place: Place, promised: int, cached: dict[int, bool], why: str) -> None:
        self._enough(
            place, promised, self._rows.of(self._replays[place.record.request], promised + self._ahead, cached).count, why
        )

    def _enough(self, place: Place, promised: int, count: int, why: str) -> None:
        if self._compare.on(_KEPT_RULE) and count < promised:
            self._compare.report(place, _KEPT_RULE, "rows in the prefix cache", promised, count, why)

    def _whole(self, rows: int) -> int:
        """Of so many rows those whose keys are whole, in whole pages."""
        return max(0, rows - self._ahead) // self._page * self._page


# Prefix hits that were missed: `radix.hit`.
#
# A request that is prefilled begins behind the longest prefix of its tokens that the prefix cache has when its batch begins.
# A cache that misses a hit gives right answers, slowly: no other rule can see it.

_HIT_RULE = "radix.hit"


class Hits(Rules):
    """Knows which slots were the prefix cache's when the batch began."""

    def begin(self) -> None:
        of = self._context.of
        self._rows, self._tracked, self._sessions = of(CacheRows), of(TrackedStates), of(Sessions)
        self._page = self._case.page_size
        self._states = set[int]()  # slots of states that the cache had when the batch began
        self._back = RECIPES[self._case.model].window if self._model.numbers else 0
        self._restored: set[int] = set()  # slots whose rows came back from the host since the last batch
        self._cached: dict[int, bool] = {}  # slot -> whether layers with a window have its row, too
        self._ends: dict[str, int] = {}  # request -> where its last chunk ended

    @stages("batch")
    def batch(self, number: int, record: Record) -> None:
        if not self._rows.on:
            return
        slots = self._trace.integers(number, "cached")
        live = self._trace.integers(number, "window_cached") if "window_cached" in record.tensors else [1] * len(slots)
        # what one request of the batch had brought back was not there yet when others were looked up
        fresh, self._restored = self._restored, set()
        self._states = set(self._trace.integers(number, "state_cached")) if self._tracked.on else set()
        self._cached = {slot: led > 0 for slot, led in zip(slots, live, strict=True) if slot not in fresh}

    @stages("copy")
    def note_copied(self, number: int, record: Record) -> None:
        if record.numbers["restore"]:
            self._restored |= {device for device, _ in pairs_of(self._trace, number)}

    @rule("radix.hit", "4", weights="no")
    @stages("prefill")
    def prefill(self, number: int, record: Record) -> None:
        """A request is prefilled from behind the longest prefix of its tokens whose rows the prefix cache has, in whole pages,
        with those that its next row sees in a window, where layers keep states to where it has one, and no further than to
        the row from which it wants logprobs."""
        # A chunk is over. If it was the first since the request was queued, it began where its hit ended.
        before, start = self._ends.get(record.request), record.numbers["start"]
        self._ends[record.request] = record.numbers["end"]
        own = self._sessions.goes_on(record.request)
        if self._rows.on and start != before and not own and self._compare.on(_HIT_RULE):
            known = tokens_at_lookup(self._replays[record.request], number, record)
            longest = self._longest(record.request, known)
            if start < longest:
                why = f"So many of its {known} tokens have their rows in the prefix cache."
                place = Place(record, "target.extend", step=-1)
                self._compare.report(place, _HIT_RULE, "first row to be prefilled", longest, start, why)

    def _longest(self, name: str, known: int) -> int:
        """Rows of the longest prefix that can be reused, of a request with so many tokens: of those that are looked up, with
        the rows that its next row sees in a window."""
        replay = self._replays[name]
        stored, ends = self._rows.of(replay, known, self._cached), self._tracked.ends(replay.tokens[:known], self._states)
        most = min(stored.count, self._rows.looked_up(name, known)) // self._page * self._page
        most -= self._page * self._case.vllm.disable_lookahead_block_hashes  # such a hit drops its last block
        for end in range(most, 0, -self._page):
            if self._tracked.on and end not in ends:  # where layers keep states a hit ends where the cache has one
                continue
            if stored.live.issuperset(range(max(0, end - self._back), end)):
                return end
        return 0
