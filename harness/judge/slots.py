"""Who owns which slot: `draft.slots` for every forward, and `pool.accounting` for the pool as a whole."""

from torch import Tensor

from eagletwin.harness.trace import Record, Trace

from .compare import Compare, Place


class Slots:
    """Knows who owned which slot when the batch began, and compares what its forwards write with it."""

    def __init__(self, trace: Trace, compare: Compare) -> None:
        self._trace = trace
        self._compare = compare
        self._owners: dict[int, set[str]] = {}  # slot -> live requests whose req_to_token names it, when the batch began
        self._cached: set[int] = set()  # slots of the prefix cache, when the batch began
        self._written: dict[int, dict[int, str]] = {}  # forward -> slot -> request

    def batch(self, number: int, record: Record) -> None:
        """A batch begins, and this is who owns what."""
        names = {index: key.removeprefix("request.") for key, index in record.numbers.items()}
        self._owners = {}
        owners = self._trace.tensor(number, "owners").tolist()
        for slot, owner in zip(self._trace.tensor(number, "slots").tolist(), owners, strict=True):
            self._owners.setdefault(slot, set()).add(names[owner])
        self._cached = set(self._trace.tensor(number, "cached").tolist())

    def written(self, number: int, place: Place, table: Tensor, first: int) -> None:
        """Record `number` wrote `slots` for positions first, first + 1, …: the request's own, and nobody else's."""
        if not self._compare.on("draft.slots"):
            return
        request, actual = place.record.request, [int(slot) for slot in self._trace.tensor(number, "slots")]
        expected = [int(slot) for slot in table[first : first + len(actual)]]
        if len(expected) != len(actual):
            self._compare.report(place, "draft.slots", "number of slots", len(expected), len(actual))
            return
        taken = self._written.setdefault(place.record.forward, {})
        for n, (must, has) in enumerate(zip(expected, actual, strict=True)):
            if has == 0:
                problem = "slot 0, which takes padding"
            elif must != has:
                problem = f"slot {has}"
            elif has in taken:
                problem = f"slot {has}, which this forward already wrote for {taken[has]}"
            elif others := sorted(self._owners.get(has, set()) - {request}):
                problem = f"slot {has}, which is {others[0]}'s"
            elif has in self._cached:
                problem = f"slot {has}, which is the prefix cache's"
            else:
                problem = ""
            if problem:
                self._compare.report(place, "draft.slots", f"position {first + n}", f"slot {must}, {request}'s own", problem)
                return
            taken[has] = request

    def account(self, number: int, place: Place) -> None:
        """Free, cached and held slots are disjoint and make up the pool; the scheduler's own counts agree with them."""
        if not self._compare.on("pool.accounting"):
            return
        numbers = place.record.numbers
        owners: dict[int, str] = {}
        for owner in ("free", "cached", "held"):
            for slot in self._trace.tensor(number, owner).tolist():
                if slot in owners:
                    found = f"{owners[slot]} and {owner}"
                    self._compare.report(place, "pool.accounting", f"slot {slot}", "one owner", found)
                    return
                owners[slot] = owner
        free, cached = (sum(1 for owner in owners.values() if owner == kind) for kind in ("free", "cached"))
        if place.record.stage == "flushed" and free != numbers["total"]:
            self._compare.report(place, "pool.accounting", "free slots after the flush", numbers["total"], free)
        elif not numbers["live"] and numbers["protected"]:
            self._compare.report(
                place, "pool.accounting", "slots locked in the cache with no live request", 0, numbers["protected"]
            )
        elif len(owners) != numbers["total"]:
            self._compare.report(place, "pool.accounting", "slots with an owner", numbers["total"], len(owners))
        elif (numbers["available"], numbers["evictable"] + numbers["protected"]) != (free, cached):
            said = f"available {numbers['available']}, evictable {numbers['evictable']}, protected {numbers['protected']}"
            counted = f"free {free}, cached {cached}"
            self._compare.report(place, "pool.accounting", "the scheduler's own counts", counted, said)
