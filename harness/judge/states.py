"""States of layers that keep one in place of rows: `target.state`, `target.conv` and `state.slots`. Called by requests.py.

A state cannot be masked away like the row of a rejected token: verify computes one for each node, and the commit must take that
of the last accepted one. What the slot of a request holds then is what a plain recurrence over its committed tokens has.
"""

import numpy as np

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.records import Record
from eagletwin.harness.core.trace import Trace

from .compare import Compare, Phase, Place
from .story import Story

_SLOTS = "state.slots"


class States:
    """Knows which slots the requests had when a batch began."""

    def __init__(self, trace: Trace, compare: Compare) -> None:
        self._trace, self._compare = trace, compare
        self._owned: dict[str, int] = {}

    def batch(self, number: int, record: Record) -> None:
        """No two requests have one slot."""
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

    def committed(self, number: int, record: Record, phase: Phase, story: Story, last: int) -> None:
        """What is kept of a request after row `last` was committed, where its forwards look for it."""
        if story.kept is None:
            return
        place, own = Place(record, phase), self._owned.get(record.request, -1)
        slots = self._trace.integers(number, "state_slots")
        self._compare.integers(
            place, _SLOTS, [own, own], slots, "slot of the states: the request's, and that of its row, entry", 0
        )
        if not 0 <= last < len(story.kept[0]):  # what was committed has no reference, which another rule says
            return
        found = self._trace.array(number, "target_state"), self._trace.array(number, "target_conv")
        self._kept(found, place, ("target.state", "target.conv"), "", story.kept, last)

    def cached(self, number: int, place: Place, story: Story) -> None:
        """What the prefix cache keeps on the path of a request's tokens: each state is that after the prefix which leads to
        it."""
        if "cached_ends" not in place.record.tensors or story.kept is None:
            return
        kept = [self._trace.array(number, f"cached_{part}") for part in ("state", "conv")]
        for n, end in enumerate(self._trace.integers(number, "cached_ends")):
            if end <= len(story.kept[0]):
                self._kept((kept[0][n], kept[1][n]), place, ("state.tracked", "state.tracked"), "cached ", story.kept, end - 1)

    def _kept(
        self, found: tuple[Array, Array], place: Place, rules: tuple[str, str], word: str, kept: tuple[Array, Array], last: int
    ) -> None:
        """The state and the convolution's inputs after row `last`, as they were found."""
        states, windows = (rows[last] for rows in kept)  # [L, N, W, D], [L, C, K-1]
        heads, width = states.shape[1], windows.shape[2]
        self._compare.floats(
            place,
            rules[0],
            _rows(states, 2),
            _rows(found[0], 2),
            lambda n: f"{word}state after row {last}, layer with a state {n // heads}, head {n % heads}",
        )
        self._compare.floats(
            place,
            rules[1],
            _rows(windows.swapaxes(1, 2), 2),
            _rows(found[1].swapaxes(1, 2), 2),
            lambda n: f"{word}input of row {last + 1 - width + n % width}, layer with a state {n // width}",
        )

    def account(self, number: int, place: Place) -> None:
        """Free and held slots make up the pool."""
        record = place.record
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


def _rows(kept: Array, leading: int) -> Array:
    """What is kept as rows with a magnitude of their own: the first dimensions are their number."""
    return np.ascontiguousarray(kept).reshape(int(np.prod(kept.shape[:leading])), -1)
