"""Rows that leave a window: `window.slots`. Called by requests.py.

Layers with a window have slots of their own. A row's slot of theirs may be freed once no row to come sees it, and must be then:
of a request that has committed x[0..M], the next row is M, and sees the `back` rows before it. A row that is the prefix cache's
is kept or given back as the cache likes. What is freed must not be read again; poison shows who does.
"""

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.records import Record
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.families import RECIPES

from .compare import Compare, Place
from .model import model_of

_RULE = "window.slots"


class Windows:
    """Knows where the rows of each request lie in the window's slots when a batch begins.

    back   how many rows before its own a row sees
    slack  rows that may stay behind: SGLang keeps whole pages, rounds the window up to them, and with overlap decides before
           it has seen what the last two rounds committed
    """

    def __init__(self, trace: Trace, compare: Compare) -> None:
        header = trace.header
        self._trace, self._compare = trace, compare
        self._back = RECIPES[header.case.model].window if model_of(header).numbers else 0
        self._slack = 2 * header.case.page_size + 2 * header.case.most_nodes * header.engine.overlap
        self._rows: dict[str, tuple[list[int], list[int]]] = {}  # request -> by row: its slot, and the window's; 0: none
        self._cached: set[int] = set()
        self._prefilled: dict[str, int] = {}  # request -> round before which it was last prefilled

    def batch(self, number: int, record: Record) -> None:
        """A batch begins."""
        if not self._back or "window_slots" not in record.tensors:
            return
        slots, led, owners = (self._trace.array(number, name) for name in ("slots", "window_slots", "owners"))
        self._cached = set(self._trace.integers(number, "cached"))
        self._rows = {key.removeprefix("request."): _of(owners == owner, slots, led) for key, owner in record.numbers.items()}

    def prefill(self, place: Place, chunk: range) -> None:
        """A chunk is about to run."""
        self._prefilled[place.record.request] = place.record.round
        self._kept(place, chunk.start, chunk.stop)

    def round(self, place: Place, committed: int, stop: int) -> None:
        """Verify is about to write rows up to `stop`, the first of which is row `committed`."""
        if self._kept(place, committed, stop) and self._prefilled.get(place.record.request) != place.record.round:
            self._given_back(place, committed)

    def _kept(self, place: Place, first: int, stop: int) -> bool:
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


def _of(own: Array, slots: Array, led: Array) -> tuple[list[int], list[int]]:
    return slots[own].tolist(), led[own].tolist()
