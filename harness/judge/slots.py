"""Who owns which slot: `draft.slots` for every forward, and `pool.accounting` for the pool as a whole."""

from collections.abc import Sequence

import torch
from torch import Tensor

from eagletwin.harness.trace import Record, Trace

from .compare import Compare, Place


class Slots:
    """Knows who owned which slot when the batch began, and compares what its forwards write with it."""

    def __init__(self, trace: Trace, compare: Compare) -> None:
        self._trace = trace
        self._compare = compare
        self._owners: dict[int, list[str]] = {}  # slot -> live requests whose req_to_token names it, when the batch began
        self._cached: set[int] = set()  # slots of the prefix cache, when the batch began
        self._written: dict[int, dict[int, str]] = {}  # forward -> slot -> request
        self._tables: dict[str, list[int]] = {}  # request -> its row of req_to_token, after its last forward
        self._prefilled: dict[str, int] = {}  # request -> round before which it was last prefilled
        self._overlap = trace.header.engine.overlap
        self._radix_cache = trace.header.case.engine.sglang.radix_cache

    def batch(self, number: int, record: Record) -> None:
        """A batch begins, and this is who owns what."""
        names = {index: key.removeprefix("request.") for key, index in record.numbers.items()}
        self._owners = {}
        owners = self._trace.tensor(number, "owners").tolist()
        for slot, owner in zip(self._trace.tensor(number, "slots").tolist(), owners, strict=True):
            self._owners.setdefault(slot, []).append(names[owner])
        self._cached = set(self._trace.tensor(number, "cached").tolist())

    def written(self, number: int, place: Place, table: list[int], columns: Sequence[int]) -> None:
        """Record `number` wrote `slots`: the request's own, those of these columns of its row, and nobody else's."""
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
        taken = self._written.setdefault(place.record.forward, {})
        for n, (must, has) in enumerate(zip(expected, actual, strict=True)):
            if has == 0:
                problem = "slot 0, which takes padding"
            elif must != has:
                problem = f"slot {has}"
            elif has in taken:
                problem = f"slot {has}, which this forward already wrote for {taken[has]}"
            elif others := [owner for owner in self._owners.get(has, ()) if owner != request]:
                problem = f"slot {has}, which is {min(others)}'s"
            elif has in self._cached:
                problem = f"slot {has}, which is the prefix cache's"
            else:
                problem = ""
            if problem:
                self._compare.report(place, "draft.slots", f"column {columns[n]}", f"slot {must}, {request}'s own", problem)
                return
            taken[has] = request

    def kept(self, place: Place, table: list[int]) -> None:
        """Nothing in the request's row of req_to_token has changed since its last forward: nobody else writes there."""
        before = self._tables.get(place.record.request)
        if before is not None:
            self._compare.integers(place, "draft.slots", before, table[: len(before)], "row of req_to_token, column", 0)

    def keep(self, record: Record, table: list[int]) -> None:
        """The request's row up to the committed tokens, after a prefill or a round."""
        self._tables[record.request] = table
        if record.stage == "prefill":
            self._prefilled[record.request] = record.round
        # the cache puts its own slots in place of equal ones when the prefill's end is seen: with overlap, a round later
        just_now = record.stage == "prefill" or (self._overlap and self._prefilled.get(record.request) == record.round)
        if just_now and self._radix_cache:
            del self._tables[record.request]

    def account(self, number: int, place: Place) -> None:
        """Free, cached and held slots are disjoint and make up the pool; the scheduler's own counts agree with them."""
        if not self._compare.on("pool.accounting"):
            return
        numbers, kinds = place.record.numbers, ("free", "cached", "held")
        slots = torch.cat([self._trace.tensor(number, kind) for kind in kinds])
        free, cached, held = (self._trace.tensor(number, kind).shape[0] for kind in kinds)
        if not _distinct(slots):
            owners: dict[int, str] = {}
            for slot, owner in zip(slots.tolist(), ["free"] * free + ["cached"] * cached + ["held"] * held, strict=True):
                if slot in owners:
                    found = f"{owners[slot]} and {owner}"
                    self._compare.report(place, "pool.accounting", f"slot {slot}", "one owner", found)
                    return
                owners[slot] = owner
        page = self._trace.header.case.page_size  # the first page takes padding, and nobody owns it
        outside = slots[(slots < page) | (slots >= numbers["total"] + page)]
        if outside.numel():
            self._compare.report(
                place, "pool.accounting", "slots with an owner", "slots of the pool", f"slot {int(outside[0])}"
            )
        elif place.record.stage == "flushed" and free != numbers["total"]:
            self._compare.report(place, "pool.accounting", "free slots after the flush", numbers["total"], free)
        elif not numbers["live"] and numbers["protected"]:
            self._compare.report(
                place, "pool.accounting", "slots locked in the cache with no live request", 0, numbers["protected"]
            )
        elif len(slots) != numbers["total"]:
            self._compare.report(place, "pool.accounting", "slots with an owner", numbers["total"], len(slots))
        elif (numbers["available"], numbers["evictable"] + numbers["protected"]) != (free, cached):
            said = f"available {numbers['available']}, evictable {numbers['evictable']}, protected {numbers['protected']}"
            counted = f"free {free}, cached {cached}"
            self._compare.report(place, "pool.accounting", "the scheduler's own counts", counted, said)


def _distinct(slots: Tensor) -> bool:
    """Whether none of slots [n] is there twice. Counting needs memory for the largest, which in a wrong trace is anything."""
    if slots.shape[0] == 0:
        return True
    low, high = slots.aminmax()
    if slots.is_floating_point() or int(low) < 0 or int(high) > 16 * slots.shape[0]:
        return bool(torch.unique(slots).shape[0] == slots.shape[0])
    return int(torch.bincount(slots).amax()) == 1
