"""Whether each event of the case had its effect on the scheduler: an ignored event is a divergence, not a pass. Of aborts that
come inside a step aborts.py says it.

Called by requests.py. It looks at when records were made, never at their numbers.
"""

from eagletwin.harness.core.case import Case, Event
from eagletwin.harness.core.records import Record
from eagletwin.harness.core.trace import Trace

from .compare import Compare, Place

_RULE = "schedule.events"
WORK = ("prefill", "draft", "verify", "extend")


class Events:
    """Checks the events of one case."""

    def __init__(self, trace: Trace, compare: Compare) -> None:
        self._case: Case = trace.header.case
        self._records = trace.header.records
        self._compare = compare
        self._overlap = trace.header.engine.overlap
        self._turns = trace.header.engine.pp
        self._counts = {record.iteration: number for number, record in enumerate(self._records) if record.stage == "iteration"}
        self._trace = trace
        self._ended = {record.request: record for record in self._records if record.stage == "finished"}
        self._seen = max(self._counts, default=-1)  # the last iteration that the trace knows to have begun

    def check(self) -> None:
        paused = False
        for number, event in enumerate(self._case.events):
            if event.at >= self._seen:  # the run ended before its effect could show
                return
            if event.step:
                continue
            if event.kind == "abort":
                self._abort(event, self._scheduled(number, paused))
            elif event.kind == "retract":
                self._retract(event)
            elif event.kind == "flush":
                self._flush(event)
            else:
                paused = event.kind == "pause"
                if paused:
                    self._pause(event, self._resumed(number))

    def _resumed(self, number: int) -> int:
        """The iteration in which the scheduler works again after event `number`."""
        later = (event.at for event in self._case.events[number + 1 :] if event.kind == "resume")
        return next(later, self._case.last_arrival + 1)

    def _scheduled(self, number: int, paused: bool) -> int:
        """The first iteration, from event `number` on, in which batches run."""
        at = self._case.events[number].at
        for later, event in enumerate(self._case.events[number + 1 :], number + 1):
            if event.at > at:
                break
            if event.kind in ("pause", "resume"):
                paused, number = event.kind == "pause", later
        return self._resumed(number) if paused else at

    def _unfinished(self, at: int) -> list[str]:
        """Requests that were handed in by iteration `at` and had not ended when it began."""
        handed_in = [request.id for request in self._case.requests if request.arrive <= at]
        return [name for name in handed_in if name not in self._ended or self._ended[name].iteration > at]

    def _work(self, name: str, begin: int, end: int) -> Record | None:
        """The first record of work on a request (any, if "") in iterations begin..end-1."""
        return next(
            (
                record
                for record in self._records
                if record.stage in WORK and begin <= record.iteration < end and name in ("", record.request)
            ),
            None,
        )

    def _abort(self, event: Event, scheduled: int) -> None:
        """An aborted request finishes one more step at most (if it is queued again, it must be prefilled for that step).

        With overlap a step is launched before the end of the one before is seen: of one that was under way when the abort came,
        or else of the first after it. What was under way of a request that is retracted before its end is seen has none, and a
        pool that is too small may do so again and again: what counts is what came after the last retraction.
        """
        name = event.request
        if name not in self._unfinished(event.at) or scheduled >= self._seen or not self._compare.on(_RULE):
            return
        own = [
            record
            for record in self._records
            if record.request == name and (record.stage == "verify" or (record.stage == "prefill" and record.numbers["final"]))
        ]
        all_steps = [record.iteration for record in own]
        steps = [iteration for iteration in all_steps if iteration >= event.at]
        ended, place = self._ended.get(name), self._place(event)
        begun = [record.iteration for record in own if record.stage == "prefill" and record.iteration >= event.at]
        if self._overlap and begun:  # each of these prefills but the first shows that the steps before it were lost
            last, most = [iteration for iteration in steps if iteration >= begun[-1]], 2
        else:
            last, most = steps, 2 if self._overlap and event.at - 1 not in all_steps else 1
        if len(last) > most:
            expected = "one more step at most" if most == 1 else "two more steps at most"
            self._compare.report(place, _RULE, f"abort of {name}", expected, f"steps in iterations {steps}")
        elif ended is not None and not ended.numbers["aborted"]:
            self._compare.report(place, _RULE, f"abort of {name}", "an aborted request", "one that finished")

    def _retract(self, event: Event) -> None:
        """Everything that ran starts again with a prefill."""
        for name in self._unfinished(event.at):
            again = self._work(name, event.at, self._seen + 1)
            if again is None or self._work(name, 0, event.at) is None or not self._compare.on(_RULE):
                continue
            if again.stage != "prefill" or "mixed" in again.numbers:
                place = self._place(event)
                self._compare.report(place, _RULE, f"retraction of {name}", "a prefill next", f"{again.stage} next")

    def _pause(self, event: Event, resumed: int) -> None:
        if not self._compare.on(_RULE):
            return
        batch = self._work("", event.at, min(resumed, self._seen + 1))
        if batch is not None:
            reported = f"a batch in iteration {batch.iteration}"
            self._compare.report(self._place(event), _RULE, f"pause until iteration {resumed}", "no batch", reported)

    def _flush(self, event: Event) -> None:
        """Where nothing waits or runs, SGLang must do it. A batch counts as running until an iteration passes without one, and
        none passes in a pause; in a pipeline, whose batches take turns, until its own turn comes."""
        after = self._counts[event.at + 1]
        paused = any(before.kind == "pause" and before.at <= event.at for before in self._case.events)
        running = self._unfinished(event.at) or self._work("", event.at - self._turns, event.at) is not None
        copying = self._records[self._counts[event.at]].numbers.get("copying")
        if paused or running or copying or not self._compare.on(_RULE):
            return
        cached = len(self._trace.tensor(after, "cached"))
        if cached:
            self._compare.report(self._place(event), _RULE, "slots in the cache after the flush", 0, cached)

    def _place(self, event: Event) -> Place:
        return Place(self._records[self._counts[event.at]], "iteration")
