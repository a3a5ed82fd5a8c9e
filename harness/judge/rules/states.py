"""Layers that keep states: `target.state`, `target.conv`, `state.slots`; and the prefix cache's states, `state.tracked`."""

from dataclasses import dataclass
from math import lcm

import numpy as np

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.records import Record
from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.recipe import TRACKED_EVERY

from ..compare import Phase, Place
from ..context import Rules
from . import rule, stages

# States of layers that keep one in place of rows: `target.state`, `target.conv` and `state.slots`.
#
# A state cannot be masked away like the row of a rejected token: verify computes one for each node, and the commit must take
# that of the last accepted one. What the slot of a request holds then is what a plain recurrence over its committed tokens has.

_SLOTS = "state.slots"
_PHASES: dict[str, Phase] = {"prefill": "target.extend", "extend": "verify"}  # in which a commit is made


class States(Rules):
    """Knows which slots the requests had when a batch began."""

    def begin(self) -> None:
        self._owned: dict[str, int] = {}

    @rule("state.slots", "4", weights="no", also=("prefill", "extend", "iteration", "flushed"))
    @stages("batch")
    def batch(self, number: int, record: Record) -> None:
        """A request has one slot for its states, alone, and its forwards use that; free, held and cached slots are disjoint and
        make up the pool, and all are free after the flush."""
        if "states" not in record.tensors:
            return
        names = sorted(record.numbers, key=record.numbers.__getitem__)
        slots = self._trace.integers(number, "states")
        self._owned = {name.removeprefix("request."): slot for name, slot in zip(names, slots, strict=True) if slot >= 0}
        place = Place(record, "iteration")
        if not self._compare.on(_SLOTS):
            return
        taken: dict[int, str] = {}
        for name, slot in self._owned.items():
            if slot in taken:
                self._compare.report(place, _SLOTS, f"slot of {name}'s states", "its own", f"{slot}, which is {taken[slot]}'s")
                return
            taken[slot] = name

    @rule("target.state", "3.11", weights="yes")
    @stages("prefill", "extend")
    def state(self, number: int, record: Record) -> None:
        """After a commit the state of each layer that keeps one is the recurrence over x[0..i], i the last committed row: after
        verify that of the last accepted node."""
        kept, place, last = self._reference_states(record), Place(record, _PHASES[record.stage]), self._last(record)
        if kept is None:
            return
        slots, own = self._trace.integers(number, "state_slots"), self._owned.get(record.request, -1)
        name = "slot of the states: the request's, and that of its row, entry"
        self._compare.integers(place, _SLOTS, [own, own], slots, name, 0)
        if 0 <= last < len(kept[0]):  # else what was committed has no reference, which another rule says
            found = self._trace.array(number, "target_state")
            self._states(place, "target.state", "", found, kept[0][last], last)

    @rule("target.conv", "3.11", weights="yes")
    @stages("prefill", "extend")
    def inputs(self, number: int, record: Record) -> None:
        """After a commit the inputs that a layer's convolution keeps are those of the last committed rows, the newest last, and
        0 before the first."""
        kept, last = self._reference_states(record), self._last(record)
        if kept is not None and 0 <= last < len(kept[1]):
            place, found = Place(record, _PHASES[record.stage]), self._trace.array(number, "target_conv")
            self._inputs(place, "target.conv", "", found, kept[1][last], last)

    def _last(self, record: Record) -> int:
        """The last row that was committed."""
        return (record.numbers["end"] if record.stage == "prefill" else self._round(record).end) - 1

    def _reference_states(self, record: Record) -> tuple[Array, Array] | None:
        """What the reference keeps after each row of a request; None: there is nothing to compare with it."""
        return self._replay(record).kept if record.stage == "extend" or self._has_output(record) else None

    @stages("cached")
    def cached(self, number: int, record: Record) -> None:
        """What the prefix cache keeps on the path of a request's tokens: each state is that after the prefix which leads to
        it."""
        replay, place = self._replay(record), Place(record, "finished")
        if "cached_ends" not in record.tensors or replay.kept is None:
            return
        kept = [self._trace.array(number, f"cached_{part}") for part in ("state", "conv")]
        for n, end in enumerate(self._trace.integers(number, "cached_ends")):
            if end <= len(replay.kept[0]):
                self._states(place, "state.tracked", "cached ", kept[0][n], replay.kept[0][end - 1], end - 1)
                self._inputs(place, "state.tracked", "cached ", kept[1][n], replay.kept[1][end - 1], end - 1)

    def _states(self, place: Place, rule: str, word: str, found: Array, states: Array, last: int) -> None:
        """States [L, N, W, D] after row `last`."""
        name, heads = f"{word}state after row {last}, layer with a state", states.shape[1]
        self._compare.floats(place, rule, _rows(states), _rows(found), lambda n: f"{name} {n // heads}, head {n % heads}")

    def _inputs(self, place: Place, rule: str, word: str, found: Array, windows: Array, last: int) -> None:
        """The inputs of convolutions [L, C, K-1] after row `last`."""
        width, expected, actual = windows.shape[2], windows.swapaxes(1, 2), found.swapaxes(1, 2)

        def name(n: int) -> str:
            return f"{word}input of row {last + 1 - width + n % width}, layer with a state {n // width}"

        self._compare.floats(place, rule, _rows(expected), _rows(actual), name)

    @stages("iteration", "flushed")
    def account(self, number: int, record: Record) -> None:
        """Free and held slots make up the pool."""
        place = self._place(record)
        if "state_free" not in record.tensors or not self._compare.on(_SLOTS):
            return
        total = record.numbers["state_total"]
        held, cached = (self._trace.integers(number, f"state_{kind}") for kind in ("held", "cached"))
        listed = [0] * (total + 1)
        for first, length, times in self._trace.array(number, "state_free").tolist():
            for slot in range(first, first + length):
                if slot > total:
                    self._compare.report(place, _SLOTS, "free slots of states", f"up to {total}", f"slot {slot}")
                    return
                listed[slot] += times
        for slot in (*held, *cached):
            listed[slot] += 1
        for slot, times in enumerate(listed):
            due = int(slot > 0)  # the first takes padding, and has no owner
            if times != due:
                what = "free, one request's or the cache's" if due else "nobody's"
                self._compare.report(
                    place, _SLOTS, f"slot {slot} of states", what, f"{times} owners, of whom {held.count(slot)} requests"
                )
                return


def _rows(kept: Array) -> Array:
    """What is kept as rows with a magnitude of their own: the first two dimensions are their number."""
    return np.ascontiguousarray(kept).reshape(kept.shape[0] * kept.shape[1], -1)


# Which states the prefix cache is handed, and that it is handed them: `state.tracked`.
#
# While a request runs, states of its are tracked for the prefix cache, and handed to it: after a chunk of a prefill that of the
# chunk's last whole step, if the chunk begins with a page, and when the request ends that of the last row on the grid which its
# rounds passed. Where keys are pairs of tokens, as hidden states demand (entry `hybrid-keys`), a key ends with the token behind
# that row: nothing is due of a row behind which no token is known, and a state is no other request's that goes on with another
# token. The cache is asked for nothing here, since a look-up changes what it evicts next: which row's state lies in a slot is
# told by its numbers. No two rows have one state by chance.

_RULE = "state.tracked"
_NAMED = 3  # rows that a report names


@dataclass(frozen=True, slots=True)
class _Due:
    """What the cache must be handed of a chunk that ended at `end`: a state after one of so many rows."""

    request: str
    end: int
    rows: list[int]


class TrackedStates(Rules):
    """Knows after how many rows of which request the states in the prefix cache are."""

    def begin(self) -> None:
        case, model = self._case, self._model
        self.on = bool(model.keeping) and model.numbers and case.engine.sglang.radix_cache
        self._ahead = model.ahead
        self._page = case.page_size
        self._step = lcm(RECIPES[case.model].tracked_every, case.page_size) if self.on else 1
        self._grid = lcm(self._step, TRACKED_EVERY)
        self._rows: dict[int, list[tuple[str, int]]] = {}  # slot of the cache -> requests, and after how many rows
        self._may: dict[str, set[int]] = {}  # request -> after how many rows a state may have been tracked
        self._due: list[_Due] = []  # when the next iteration begins
        # request -> of its last chunk: handed over when the next one is made up, or if there is none when its result is looked
        # at, with overlap when the request's first round has begun
        self._open: dict[str, _Due] = {}
        self._late = self._trace.header.engine.overlap
        self._passed: dict[str, list[int]] = {}  # request -> rows on the grid that its rounds passed since it was prefilled
        self._given_up = 0
        self._lost = False  # whether the cache gave a state up in the iteration before

    @stages("prefill")
    def prefill(self, _number: int, record: Record) -> None:
        """A chunk is over. A mixed step tracks nothing of a request that runs."""
        if not (self.on and self._has_output(record)) or record.numbers.get("mixed"):
            return
        name, start, end = record.request, record.numbers["start"], record.numbers["end"]
        self._passed[name] = []
        # The cache has whole pages: behind a chunk that ended inside one, no step of a chunk ends with a page.
        rows = [] if start % self._page else list(range(start + self._step, end + 1, self._step))
        self._may.setdefault(name, set()).update(rows)
        self._hand_over(name, start)
        final = record.numbers["final"]
        if rows and rows[-1] + self._ahead <= (end if final else end + 1):
            # The engine tracks where the cache's rows part, in place of the last one, if that is a step of this chunk
            parts = [row for row in rows[:-1] if any(self._alike(name, other, row) for other in self._replays if other != name)]
            due = _Due(name, end, [*parts, rows[-1]])
            if final and not self._late:
                self._due.append(due)
            else:
                self._open[name] = due

    @stages("extend")
    def round(self, _number: int, record: Record) -> None:
        row = self._round(record).end // self._grid * self._grid
        self._hand_over(record.request)
        if self.on and row > self._round(record).committed:
            self._may.setdefault(record.request, set()).add(row)
            self._passed.setdefault(record.request, []).append(row)

    @rule("state.tracked", "3.11", weights="yes", also=("cached", "finished"))
    @stages("iteration")
    def look(self, number: int, record: Record) -> None:
        """The state and the convolution's inputs that the prefix cache keeps of a prefix are those after its last row. It is
        handed those after the last step of a chunk that begins with a page, and when a request ends those after the last row
        on the grid that its rounds passed."""
        if not self.on:
            return
        given_up, self._given_up = self._given_up, record.numbers["state_given_up"]
        self._lost = given_up != self._given_up
        owned = set(self._trace.integers(number, "state_cached"))
        self._rows = {slot: rows for slot, rows in self._rows.items() if slot in owned}
        kept = [self._trace.array(number, f"tracked_{part}") for part in ("state", "conv")]
        for n, slot in enumerate(self._trace.integers(number, "tracked")):
            self._rows[slot] = [
                (name, row) for name, rows in self._may.items() for row in rows if self._is(name, row, (kept[0][n], kept[1][n]))
            ]
            if self._compare.on(_RULE) and not self._rows[slot]:
                self._report(record, f"state in slot {slot} of the prefix cache", (kept[0][n], kept[1][n]))
        self._demand(record)

    def _hand_over(self, name: str, start: int | None = None) -> None:
        """What is open of a request is due now, unless it is prefilled from elsewhere (`start`) than its last chunk ended."""
        due = self._open.pop(name, None)
        if due is not None and start in (None, due.end):
            self._due.append(due)

    def _demand(self, record: Record) -> None:
        """That what was due came. What was given up meanwhile cannot be told from what never came."""
        due, self._due = self._due, []
        if self._lost:
            self._open.clear()
            return
        for one in due:
            _, ended = self._context.ended.get(one.request, (0, None))
            over = ended is not None and ended.numbers["aborted"] and ended.iteration == record.iteration
            if self._compare.on(_RULE) and not over and not any(self._has(one.request, row) for row in one.rows):
                self._missing(record, one.request, one.rows[-1], "its chunk")

    @stages("finished")
    def check_finished(self, number: int, record: Record) -> None:
        if not self.on or record.numbers["aborted"]:
            return
        self._hand_over(record.request)
        if self._lost:
            return
        known = len(self._replay(record).prompt) + len(self._trace.integers(number, "tokens"))
        due = [row for row in self._passed.get(record.request, []) if row + self._ahead < known]
        if due and self._compare.on(_RULE) and not self._has(record.request, due[-1]):
            self._missing(record, record.request, due[-1], "a round")

    def ends(self, tokens: list[int], slots: set[int]) -> set[int]:
        """After how many of these tokens the cache has a state in one of these slots, under a key that these tokens have.

        Requests that part behind a row have one state there under several keys of pairs, and no number tells under which.
        """
        return {
            row
            for slot, owners in self._rows.items()
            if slot in slots
            for row in {row for _, row in owners}
            if all(
                self._replays[name].tokens[: row + self._ahead] == tokens[: row + self._ahead]
                for name, other in owners
                if other == row
            )
        }

    def _alike(self, name: str, other: str, rows: int) -> bool:
        return self._replays[name].tokens[:rows] == self._replays[other].tokens[:rows]

    def _has(self, name: str, rows: int) -> bool:
        return any(row == rows and self._alike(name, other, rows) for owners in self._rows.values() for other, row in owners)

    def _is(self, name: str, rows: int, held: tuple[Array, Array], parts: tuple[int, ...] = (0, 1)) -> bool:
        """Whether state and window [L, ..] are those after so many rows of a request, within the bound; parts: one or both."""
        kept = self._replays[name].kept
        if kept is None or rows > len(kept[0]):
            return False
        return all(float(self._bounds.error_of(_flat(kept[n][rows - 1]), _flat(held[n])).max()) <= 1 for n in parts)

    def _report(self, record: Record, what: str, held: tuple[Array, Array]) -> None:
        wanted = [f"{rows} rows of {name}" for name, those in self._may.items() for rows in sorted(those)][-_NAMED:]
        kept = {name: len(replay.kept[0]) for name, replay in self._replays.items() if replay.kept is not None}
        every = [(name, rows) for name, count in kept.items() for rows in range(1, count + 1)]
        found = (next((one for one in every if self._is(*one, held, (part,))), None) for part in range(2))
        texts = [f"{_PARTS[part]} after {one[1]} rows of {one[0]}" for part, one in enumerate(found) if one is not None]
        named = ", ".join(texts) or "of no row of any request"
        expected = f"those after {' or '.join(wanted)}" if wanted else "none: no request came to a row that is tracked"
        self._compare.report(Place(record, "iteration"), _RULE, what, expected, named)

    def _missing(self, record: Record, name: str, rows: int, passed: str) -> None:
        place = self._place(record)
        why = f"{passed[0].upper()}{passed[1:]} of {name} came to {rows} rows, and the prefix cache gave up no state since."
        self._compare.report(place, _RULE, f"state after {rows} rows of {name}", "in the prefix cache", "not there", why)


_PARTS = ("a state", "inputs of a convolution")


def _flat(kept: Array) -> Array:
    """What is kept of a row as rows with a magnitude of their own: states [L, N, W, D] by head, windows [L, C, K-1] by row."""
    return _rows(kept.swapaxes(1, 2) if kept.ndim == 3 else kept)
