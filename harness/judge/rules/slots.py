"""Who owns which slot: `draft.slots` for every forward, `window.slots`, and `pool.accounting` for the pool as a whole."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from eagletwin.harness.core.records import Record
from eagletwin.harness.families import RECIPES
from eagletwin.reference.layout import draft_columns, verify_columns

from ..compare import Exhibit, Place
from ..context import Rules
from ..replay import Round
from . import rule, stages
from .sessions import Sessions


class Slots(Rules):
    """Knows who owned which slot when the batch began, and compares what its forwards write with it."""

    def begin(self) -> None:
        self._owners: list[tuple[int, str]] = []  # slots, and live requests whose req_to_token names them, when the batch began
        self._foreign: dict[str, set[int]] = {}  # request -> those of them that are others'
        self._cached: set[int] = set()  # slots of the prefix cache, when the batch began
        self._check_window: set[int] = set()  # slots that sessions keep, while no request of theirs runs
        self._written: dict[int, dict[int, str]] = {}  # forward -> slot -> request
        self._tables: dict[str, list[int]] = {}  # request -> its row of req_to_token, after its last forward
        self._prefilled: dict[str, int] = {}  # request -> round before which it was last prefilled
        self._overlap = self._trace.header.engine.overlap
        self._radix_cache = self._case.prefix_cache

    @stages("batch")
    def batch(self, number: int, record: Record) -> None:
        names = {index: key.removeprefix("request.") for key, index in record.numbers.items()}
        owners = [names[owner] for owner in self._trace.integers(number, "owners")]
        self._owners, self._foreign = list(zip(self._trace.integers(number, "slots"), owners, strict=True)), {}
        self._cached = set(self._trace.integers(number, "cached"))
        self._check_window = set(self._trace.integers(number, "kept")) if "kept" in record.tensors else set()

    @rule("draft.slots", "4", weights="no", also=("draft",))
    @stages("target.extend", "draft.extend", "draft.decode", "target.verify", "draft.extend_decode")
    def forward(self, number: int, record: Record) -> None:
        """Every written slot is the request's own entry of req_to_token for its column, and nobody else's; no entry changes
        behind its back."""
        # Those of draft() come before its steps: all are assigned before its first forward, and a slot that is written twice
        # shows in the row of an earlier step.
        columns: Sequence[int]
        if record.stage == "draft.decode" and not (record.round < len(self._replay(record).rounds) and self._model.memory):
            return
        # of verify and the draft extend after it: the row of the round, unless the record brings its own
        own = record.stage in ("target.verify", "draft.extend_decode") and "table" in record.tensors
        table = self._trace.integers(number, "table") if own else self._context.table(record)
        if table is None:
            return
        if record.stage in ("target.extend", "draft.extend"):
            columns = self._context.chunk(number, record)
        elif record.stage == "draft.decode":
            at_step = record.step - self._model.ahead
            columns = [branch[at_step] for branch in self._branches(self._round(record))]
        else:
            round = self._round(record)
            packed = own and record.stage == "draft.extend_decode"  # spec v1 runs the accepted rows only
            columns = range(round.committed, round.end) if packed else _block(round.committed, round.nodes)
        self._forward(number, self._place(record, layer=record.layer), table, columns)

    def _branches(self, round: Round) -> list[list[int]]:
        return _columns(round.committed, self._case.topk, round.steps, self._case.page_size)

    def _forward(self, number: int, place: Place, table: list[int], columns: Sequence[int]) -> None:
        """Record `number` wrote `slots`: they must be the request's own, those of these columns of its row, and no others."""
        if not self._compare.on("draft.slots"):
            return
        request, actual = place.record.request, self._trace.integers(number, "slots")
        if len(columns) != len(actual):
            self._compare.report(place, "draft.slots", "number of slots", len(columns), len(actual))
            return
        if max(columns, default=0) >= len(table):
            self._compare.report(place, "draft.slots", f"column {max(columns)}", "a slot", f"{len(table)} slots were allocated")
            return
        expected = [table[column] for column in columns]
        taken, written = self._written.setdefault(place.record.forward, {}), {*actual}
        if request not in self._foreign:
            theirs = {slot for slot, owner in self._owners if owner != request}
            self._foreign[request] = theirs - self._shared(request) if self._engine.early else theirs
        nobodys = all(map(written.isdisjoint, (taken, self._foreign[request], self._cached, self._check_window)))
        if actual == expected and nobodys and 0 not in written and len(written) == len(actual):
            taken.update(dict.fromkeys(actual, request))
            return
        for n, (own, slot) in enumerate(zip(expected, actual, strict=True)):  # one of them is wrong: which, and how
            if slot == 0:
                problem = "slot 0, which takes padding"
            elif own != slot:
                problem = f"slot {slot}"
            elif slot in taken:
                problem = f"slot {slot}, which this forward already wrote for {taken[slot]}"
            elif slot in self._foreign[request]:
                others = [owner for owned, owner in self._owners if owned == slot and owner != request]
                problem = f"slot {slot}, which is {min(others)}'s"
            elif slot in self._cached:
                problem = f"slot {slot}, which is the prefix cache's"
            elif slot in self._check_window:
                problem = f"slot {slot}, which a session keeps"
            else:
                problem = ""
            if problem:
                wrong = [at for at, (one, other) in enumerate(zip(expected, actual, strict=True)) if one != other or at == n]
                shown = Exhibit(name=lambda at: f"column {columns[at]}", wrong=wrong, expected=expected, actual=actual)
                said = (f"column {columns[n]}", f"slot {own}, {request}'s own", problem)
                self._compare.report(place, "draft.slots", *said, shown=shown)
                return
            taken[slot] = request

    def _shared(self, request: str) -> set[int]:
        """Slots that another request has for the same column: rows that both see, if their tokens are the same."""
        tables = dict[str, list[int]]()
        for slot, owner in self._owners:
            tables.setdefault(owner, []).append(slot)
        own = tables.pop(request, [])
        return {slot for other in tables.values() for slot, theirs in zip(own, other, strict=False) if slot == theirs}

    @stages("draft")
    def round(self, number: int, record: Record) -> None:
        """The request's row of req_to_token must be as its last forward left it: only the request itself writes there. And the
        slots of draft decode, by branch and step, are laid out before the first forward."""
        place, table = Place(record, "draft"), self._trace.integers(number, "table")
        before = self._tables.get(record.request)
        if before is not None:
            self._compare.integers(place, "draft.slots", before, table[: len(before)], "row of req_to_token, column", 0)
        if self._model.memory and not record.numbers.get("undrafted"):
            branches = self._branches(self._round(record))
            laid_out = [branch if self._engine.spare_slot else branch[:-1] for branch in branches]
            expected = [table[column] if column < len(table) else -1 for branch in laid_out for column in branch]
            slots = self._trace.integers(number, "scratch_slots")
            self._compare.integers(place, "draft.slots", expected, slots, "slot, by branch and step,", 0)

    @stages("prefill", "extend")
    def keep(self, number: int, record: Record) -> None:
        """The request's row up to the committed tokens, after a prefill or a round."""
        self._tables[record.request] = self._trace.integers(number, "table")
        if record.stage == "prefill":
            self._prefilled[record.request] = record.round
        # the cache puts its own slots in place of equal ones when the prefill's end is seen: with overlap, a round later
        just_now = record.stage == "prefill" or (self._overlap and self._prefilled.get(record.request) == record.round)
        if just_now and self._radix_cache:
            del self._tables[record.request]

    @stages("pool")
    def check_counts(self, _number: int, record: Record) -> None:
        """A server's pool between two batches, by the engine's own counts: which slots they are was not recorded."""
        if not self._compare.on("pool.accounting"):
            return
        numbers = record.numbers
        parts = {name: numbers[name] for name in ("available", "evictable", "protected", "held")}
        if sum(parts.values()) != numbers["total"] or min(parts.values()) < 0:
            place = Place(record, "iteration")
            counted = ", ".join(f"{name} {count}" for name, count in parts.items())
            self._compare.report(place, "pool.accounting", "slots with an owner", numbers["total"], counted)

    @rule("pool.accounting", "4", weights="no", also=("pool",))
    @stages("iteration", "flushed")
    def account(self, number: int, record: Record) -> None:
        """Free, cached and held slots, and those of sessions, are disjoint and make up the pool; a session that is closed holds
        none, and after everything is done and flushed, all are free."""
        # Free, cached and held slots are disjoint and make up the pool; the scheduler's own counts agree with them. So of the
        # slots of windows, where layers have such.
        place = self._place(record)
        if not self._compare.on("pool.accounting"):
            return
        whole, sessions = self._space(number, place, "", "slot"), self._context.of(Sessions)
        sessions.account(number, place)
        numbers = record.numbers
        # a session keeps its prefix in the cache locked, too
        idle = not numbers["live"] and not numbers.get("copying") and not sessions.any_open
        if whole and idle and numbers["protected"]:
            self._compare.report(
                place, "pool.accounting", "slots locked in the cache with no live request", 0, numbers["protected"]
            )
        elif whole and "window_total" in numbers:
            self._space(number, place, "window_", "slot of a window")
        for prefix, called in (("host_", "slot of the host"), ("host_window_", "slot of a window on the host")):
            if whole and f"{prefix}total" in numbers:
                self._on_host(number, place, prefix, called)

    def _on_host(self, number: int, place: Place, prefix: str, called: str) -> None:
        """A space of slots in the host's memory: each is free or the prefix cache's, once."""
        total, available = (place.record.numbers[f"{prefix}{name}"] for name in ("total", "available"))
        owners = dict[int, list[str]]()
        for first, length, times in self._trace.array(number, f"{prefix}free").tolist():
            for slot in range(first, first + length):
                owners.setdefault(slot, []).extend(["free"] * times)
        for slot in self._trace.integers(number, f"{prefix}cached"):
            owners.setdefault(slot, []).append("cached")
        twice = next((slot for slot in sorted(owners) if len(owners[slot]) > 1), None)
        free = sum(own == ["free"] for own in owners.values())
        if twice is not None:
            self._compare.report(place, "pool.accounting", f"{called} {twice}", "one owner", " and ".join(owners[twice]))
        elif len(owners) != total or max(owners) >= total:
            self._compare.report(place, "pool.accounting", f"{called}s with an owner", total, len(owners))
        elif available != free:
            self._compare.report(place, "pool.accounting", f"{called}s by the scheduler's own count", free, available)
        elif place.record.stage == "flushed" and free != total:
            self._compare.report(place, "pool.accounting", f"free {called}s after the flush", total, free)

    def _space(self, number: int, place: Place, prefix: str, called: str) -> bool:
        """One space of slots, whose tensors and numbers begin so. Whether all of it has one owner."""
        page = self._trace.header.case.page_size
        counts = ("total", "available", "evictable", "protected")
        total, available, evictable, protected = (place.record.numbers[f"{prefix}{name}"] for name in counts)
        runs = self._trace.array(number, f"{prefix}free").tolist()
        spans = [(first, first + length, "free") for first, length, times in runs for _ in range(min(times, 2))]
        kinds = ("cached", "held", *(("sessions",) if f"{prefix}sessions" in place.record.tensors else ()))
        slots = {kind: self._trace.integers(number, f"{prefix}{kind}") for kind in kinds}
        spans += [(slot, slot + 1, kind) for kind, listed in slots.items() for slot in listed]
        spans.sort()
        free = sum(length * times for _, length, times in runs)
        cached, held = len(slots["cached"]), sum(len(listed) for kind, listed in slots.items() if kind != "cached")

        def report(index: str, expected: object, actual: object) -> bool:
            self._compare.report(place, "pool.accounting", index, expected, actual)
            return False

        for (_, end, owner), (start, _, other) in pairwise(spans):
            if start < end:
                return report(f"{called} {start}", "one owner", f"{owner} and {other}")
        # the first page takes padding and has no owner
        outside = [start for start, _, _ in spans[:1] if start < page]
        outside += [max(start, total + page) for start, end, _ in spans[-1:] if end > total + page]
        if outside:
            return report(f"{called}s with an owner", "slots of the pool", f"slot {outside[0]}")
        if place.record.stage == "flushed" and free != total:
            return report(f"free {called}s after the flush", total, free)
        if free + cached + held != total:
            return report(f"{called}s with an owner", total, free + cached + held)
        if (available, evictable + protected) != (free, cached):
            reported = f"available {available}, evictable {evictable}, protected {protected}"
            return report("the scheduler's own counts", f"free {free}, cached {cached}", reported)
        return True


# Rows that leave a window: `window.slots`.
#
# Layers with a window have slots of their own. A row's slot of theirs may be freed once no row to come sees it, and must be
# then: of a request that has committed x[0..M], the next row is M, and sees the `back` rows before it. A row that is the prefix
# cache's is kept or given back as the cache likes. What is freed must not be read again; poison shows who does.

_RULE = "window.slots"


class Windows(Rules):
    """Knows where the rows of each request lie in the window's slots when a batch begins."""

    def begin(self) -> None:
        header = self._trace.header
        # rows before its own that a row sees
        self._back = RECIPES[header.case.model].window if self._model.numbers else 0
        # rows that may stay behind: the engine keeps whole pages, rounds the window up to them, and with overlap decides before
        # it has seen what the last two rounds committed
        self._slack = 2 * header.case.page_size + 2 * header.case.most_nodes * header.engine.overlap
        self._rows: dict[str, tuple[list[int], list[int]]] = {}  # request -> by row: its slot, and the window's; 0: none
        self._cached: set[int] = set()
        self._prefilled: dict[str, int] = {}  # request -> round before which it was last prefilled

    @stages("batch")
    def batch(self, number: int, record: Record) -> None:
        if not self._back or "window_slots" not in record.tensors:
            return
        slots, led, owners = (self._trace.array(number, name) for name in ("slots", "window_slots", "owners"))
        self._cached = set(self._trace.integers(number, "cached"))
        of_request = {key.removeprefix("request."): owners == owner for key, owner in record.numbers.items()}
        self._rows = {name: (slots[own].tolist(), led[own].tolist()) for name, own in of_request.items()}

    @rule("window.slots", "4", weights="no")
    @stages("target.extend", "draft")
    def look(self, number: int, record: Record) -> None:
        """A row of a layer with a window has a slot of the window's own, alone, for as long as a row to come may see it, and
        gives it back when none can."""
        # A chunk is about to run, or verify to write the rows of a round.
        if record.stage == "target.extend":
            chunk = self._context.chunk(number, record)
            self._prefilled[record.request] = record.round
            self._check_window(Place(record, "target.extend", step=-1), chunk.start, chunk.stop)
            return
        round, place = self._round(record), Place(record, "draft", step=-1)
        begun = self._prefilled.get(record.request) == record.round
        if self._check_window(place, round.committed, round.committed + round.nodes) and not begun:
            self._given_back(place, round.committed)

    def _check_window(self, place: Place, first: int, stop: int) -> bool:
        """Every row that the rows first..stop-1 see has a slot of its own. Whether that was asked and is so."""
        name = place.record.request
        if name not in self._rows or not self._compare.on(_RULE):
            return False
        _, led = self._rows[name]
        seen = range(max(0, first - self._back), stop)
        if seen.stop > len(led):
            self._compare.report(place, _RULE, f"row {len(led)}", "a slot", "none was allocated")
            return False
        owner = self._elsewhere(name)
        for row in seen:
            slot = led[row]
            if slot == 0:
                why = f"Row {first} is next, and sees the {self._back} rows before it."
                self._compare.report(place, _RULE, f"row {row}", "a slot of the window", "none: it was freed", why)
                return False
            if slot in owner:
                self._compare.report(place, _RULE, f"row {row}", "a slot of its own", f"slot {slot}, as {owner[slot]}")
                return False
            owner[slot] = f"row {row}"
        return True

    def _elsewhere(self, name: str) -> dict[int, str]:
        """Whose the window's slots of all other requests are, but for rows that this one shares with them: a cached prefix."""
        own = set(self._rows[name][0])
        return {
            window: f"row {row} of request {other}"
            for other, (slots, led) in self._rows.items()
            for row, (slot, window) in enumerate(zip(slots, led, strict=True))
            if other != name and window and slot not in own
        }

    def _given_back(self, place: Place, committed: int) -> None:
        slots, led = self._rows[place.record.request]
        last = committed - self._back - self._slack
        late = [row for row in range(max(0, last)) if led[row] and slots[row] not in self._cached]
        if late:
            more = f", and {len(late) - 1} more" if len(late) > 1 else ""
            why = f"Row {committed} is next, and sees the {self._back} rows before it."
            self._compare.report(place, _RULE, f"row {late[0]}{more}", "no slot any more", f"slot {led[late[0]]}", why)


@lru_cache(maxsize=256)  # asked for in every step of a round
def _columns(committed: int, topk: int, num_steps: int, page_size: int) -> list[list[int]]:
    """Columns of draft decode, by branch and step."""
    columns: list[list[int]] = draft_columns(committed, topk, num_steps, page_size).T.tolist()
    return columns


@lru_cache(maxsize=256)  # verify and draft extend write the same
def _block(committed: int, num_draft_tokens: int) -> list[int]:
    columns: list[int] = verify_columns(committed, num_draft_tokens).tolist()
    return columns
