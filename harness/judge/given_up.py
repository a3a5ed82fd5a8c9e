"""Requests that the scheduler gave up for want of memory, though the pool has room for them: `schedule.events`. Called by
requests.py.

Where the pool is full, SGLang retracts until one request is left, and aborts that one if even it has no room. That is right
where the pool is too small for the request alone, and there is no answer for it then: judge.py says that it cannot tell. It is
wrong where nobody holds what is missing: all else is the prefix cache's, which gives up its rows when they are asked for, at
once or when their copy to the host is done.

So nothing is said unless all of this is certain: the request ran, nobody aborted it, and it has no grammar, which may refuse a
token; no other request has rows when its end is seen, nor ended then, nor was aborted about then; and the pool has as many rows
as SGLang may ask for in all, for all tokens that the request may have, and so has that of windows. Sessions, which keep rows,
states, which have a pool of their own, adaptive steps, and the batches of a pipeline, which are several, are left out.
"""

from eagletwin.harness.core.case import Case, Request
from eagletwin.harness.core.records import Record
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.families.valid import round_slots

from .compare import Compare, Place
from .model import Model

_RULE = "schedule.events"
# Rounds that SGLang may set rows aside for: two, asked for anew while those before are still there, and one that ran on.
_ROUNDS = 5


class GivenUp:
    """Judges requests of one trace that ended by an abort."""

    def __init__(self, trace: Trace, compare: Compare, model: Model) -> None:
        case = trace.header.case
        self._trace, self._case, self._compare = trace, case, compare
        self._records = trace.header.records
        self._aborts = [event for event in case.events if event.kind == "abort"]
        self._on = (
            model.numbers
            and not (model.keeping or case.sessions)
            and case.engine.sglang.adaptive is None
            and trace.header.engine.pp == 1
        )

    def finished(self, record: Record, impossible: bool) -> None:
        """A request has ended. impossible: it asked for what cannot be."""
        if not self._on or not record.numbers["aborted"] or impossible:
            return
        request = self._case.request(record.request)
        if request.grammar is not None or request.id in {event.request for event in self._aborts}:
            return
        at = record.iteration
        number = next(n for n, one in enumerate(self._records) if (one.stage, one.iteration) == ("iteration", at))
        seen = self._records[number]
        total, most = seen.numbers["total"], _most_rows(self._case, request)
        fits = most <= min(total, seen.numbers.get("window_total", total))
        if fits and self._ran(record.request) and self._alone(record, number) and self._compare.on(_RULE):
            why = (
                f"It may have {most} rows at most, with what is set aside for rounds, and no other request has any: "
                f"of {total}, {seen.numbers['available']} are free, and the others the prefix cache's."
            )
            index = f"end of {record.request}"
            self._compare.report(Place(seen, "iteration"), _RULE, index, "one that finished", "an abort", why)

    def _ran(self, name: str) -> bool:
        """Whether its prompt was whole, so that SGLang had taken it in."""
        own = [one for one in self._records if one.request == name and one.stage in ("prefill", "verify")]
        return bool(own) and own[-1].numbers.get("final", 1) == 1

    def _alone(self, record: Record, seen: int) -> bool:
        """Whether no other request can have had rows when it was aborted, in the iteration before its end is seen. seen: the
        record of that one."""
        at = record.iteration
        ends = (one for one in self._records if (one.stage, one.iteration) == ("finished", at))
        others = any(one.request != record.request for one in ends)
        aborts = any(at - 1 <= event.at <= at for event in self._aborts)
        return not (self._records[seen].numbers["live"] or self._trace.integers(seen, "held") or others or aborts)


def _most_rows(case: Case, request: Request) -> int:
    """Rows that SGLang may want for a request that gets all of its tokens, in whole pages; rather too many than too few."""
    rows = len(request.prompt) + request.max_new_tokens + _ROUNDS * round_slots(case)
    return -(-rows // case.page_size) * case.page_size
