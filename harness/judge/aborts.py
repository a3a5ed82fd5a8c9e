"""Aborts that came inside a step: what the batch under way gave is the last that the request has. Called by requests.py.

A running request that is aborted ends when its next result is looked at, with what that gave it. Results are looked at in
the order in which their batches were launched, so that result follows from how many were looked at when the scheduler learned
of the abort. With overlap one batch more may have been launched by then; what it gives is nobody's.
"""

from eagletwin.harness.core.records import Record
from eagletwin.harness.core.trace import Trace

from .compare import Compare, Place
from .constraints import end_of

_RULE = "schedule.events"


class Aborts:
    """Judges the records of aborts of one trace."""

    def __init__(self, trace: Trace, compare: Compare) -> None:
        self._trace, self._compare = trace, compare
        self._requests = {request.id: request for request in trace.header.case.requests}
        records = trace.header.records
        self._iterations = {record.iteration: record for record in records if record.stage == "iteration"}
        self._batch = {record.iteration: record.step for record in records if record.stage == "batch"}
        self._ended = {record.request: (n, record) for n, record in enumerate(records) if record.stage == "finished"}
        self._own: dict[str, list[Record]] = {}
        for record in records:
            if record.stage in ("prefill", "verify"):
                self._own.setdefault(record.request, []).append(record)

    def came(self, _number: int, record: Record) -> None:
        """An abort: of a request that has not ended, and whose end the trace has."""
        name = record.request
        if name not in self._ended or self._ended[name][1].iteration <= record.iteration or not self._compare.on(_RULE):
            return
        number, ended = self._ended[name]
        place, index = Place(self._iterations[record.iteration], "iteration"), f"abort of {name} in its step"
        if not ended.numbers["aborted"]:
            self._compare.report(place, _RULE, index, "an aborted request", "one that finished")
            return
        own = self._own.get(name, [])
        last = self._last(own, record.numbers["read"])
        after = [one for one in own if last is not None and self._number(one) > self._number(last)]
        if len(after) > self._trace.header.engine.overlap:
            batches = f"its last result is of batch {self._number(last)}" if last is not None else "no result"
            self._compare.report(place, _RULE, index, batches, f"one of batch {self._number(after[-1])}")
        elif last is not None and not ended.numbers["dropped"]:
            tokens, given = len(self._trace.integers(number, "tokens")), self._given(name, last)
            if tokens != given:
                self._compare.report(place, _RULE, f"tokens of {name}, aborted in its step", given, tokens)

    def _last(self, own: list[Record], read: int) -> Record | None:
        """The first of its results that is looked at from batch number `read` on, and gives it tokens. One that was lost in a
        retraction is followed by a prefill. None: it ends without one, in the queue or between two chunks."""
        while True:
            steps = (one for one in own if self._number(one) >= read and one.numbers.get("final", 1))
            step = next(steps, None)
            if step is None:
                return None
            again = (one for one in own if self._number(one) > self._number(step) and _restarts(one))
            later = next(again, None)
            if later is None:
                return step
            read = self._number(later)

    def _number(self, record: Record) -> int:
        """Of the batch of a record: one runs in an iteration."""
        return self._batch[record.iteration]

    def _given(self, name: str, last: Record) -> int:
        """How many tokens the request has with what this batch gave: up to its grammar's end, and past max_new_tokens."""
        request, numbers = self._requests[name], last.numbers
        known = numbers["end"] if last.stage == "prefill" else numbers["new_seq_len"]
        tokens = known + 1 - len(request.prompt)
        emitted = self._trace.integers(self._ended[name][0], "tokens")
        over = None if request.grammar is None else end_of(request.grammar, emitted)
        return tokens if over is None else min(tokens, over + 1)


def _restarts(record: Record) -> bool:
    return record.stage == "prefill" and "mixed" not in record.numbers
