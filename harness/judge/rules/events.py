"""Whether each event of the case had its effect on the scheduler: an ignored event is a divergence, not a pass.

It looks at when records were made, never at their numbers.
"""

from eagletwin.harness.core.case import Event
from eagletwin.harness.core.records import Record
from eagletwin.harness.families.dimensions.dimension import round_slots

from ..compare import Place
from ..context import Rules
from ..request_logits import end_of
from . import rule, stages

_RULE = "schedule.events"
WORK = ("prefill", "draft", "verify", "extend")


class Events(Rules):
    def begin(self) -> None:
        self._overlap = self._trace.header.engine.overlap
        self._turns = self._trace.header.engine.pp
        self._counts = {record.iteration: number for number, record in enumerate(self._records) if record.stage == "iteration"}
        self._ended = {name: record for name, (_, record) in self._context.ended.items()}
        self._seen = max(self._counts, default=-1)  # the last iteration that the trace knows to have begun

    @rule("schedule.events", "4", weights="no", also=("abort", "finished"))
    @stages("end")
    def check(self) -> None:
        """An aborted request ends within a step, one that is aborted inside a step with what that gives; a retracted one starts
        again with a prefill, nothing runs in a pause, and an idle scheduler's cache is empty after a flush. No request is
        aborted for want of memory that nobody else holds and that is enough for it."""
        paused = False
        for number, event in enumerate(self._case.events):
            if event.at >= self._seen:  # the run ended before its effect could show
                return
            if event.step:
                continue
            if event.kind == "abort":
                self._abort(event, self._next_batch_iteration(number, paused))
            elif event.kind == "retract":
                self._retract(event)
            elif event.kind == "flush":
                self._flush(event)
            else:
                paused = event.kind == "pause"
                if paused:
                    self._pause(event, self._resume_iteration(number))

    def _resume_iteration(self, number: int) -> int:
        """The iteration in which the scheduler works again after event `number`."""
        later = (event.at for event in self._case.events[number + 1 :] if event.kind == "resume")
        return next(later, self._case.last_arrival + 1)

    def _next_batch_iteration(self, number: int, paused: bool) -> int:
        """The first iteration, from event `number` on, in which batches run."""
        at = self._case.events[number].at
        for later, event in enumerate(self._case.events[number + 1 :], number + 1):
            if event.at > at:
                break
            if event.kind in ("pause", "resume"):
                paused, number = event.kind == "pause", later
        return self._resume_iteration(number) if paused else at

    def _unfinished_requests(self, at: int) -> list[str]:
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
        if name not in self._unfinished_requests(event.at) or scheduled >= self._seen or not self._compare.on(_RULE):
            return
        own = [record for record in self._context.work[name] if record.numbers.get("final", 1)]
        all_steps = [record.iteration for record in own]
        steps = [iteration for iteration in all_steps if iteration >= event.at]
        ended, place = self._ended.get(name), self._place_of(event)
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
        for name in self._unfinished_requests(event.at):
            again = self._work(name, event.at, self._seen + 1)
            if again is None or self._work(name, 0, event.at) is None or not self._compare.on(_RULE):
                continue
            if again.stage != "prefill" or "mixed" in again.numbers:
                place = self._place_of(event)
                self._compare.report(place, _RULE, f"retraction of {name}", "a prefill next", f"{again.stage} next")

    def _pause(self, event: Event, resumed: int) -> None:
        if not self._compare.on(_RULE):
            return
        batch = self._work("", event.at, min(resumed, self._seen + 1))
        if batch is not None:
            reported = f"a batch in iteration {batch.iteration}"
            self._compare.report(self._place_of(event), _RULE, f"pause until iteration {resumed}", "no batch", reported)

    def _flush(self, event: Event) -> None:
        """Where nothing waits or runs, the engine must do it. A batch, an idle one too, counts as running until an iteration
        passes without one, and none passes in a pause; in a pipeline, whose batches take turns, until its own turn comes."""
        after = self._counts[event.at + 1]
        paused = any(before.kind == "pause" and before.at <= event.at for before in self._case.events)
        batches = (one.iteration for one in self._records if one.stage in (*WORK, "idle"))
        ran = any(event.at - self._turns <= iteration < event.at for iteration in batches)
        running = ran or self._unfinished_requests(event.at)
        copying = self._records[self._counts[event.at]].numbers.get("copying")
        if paused or running or copying or not self._compare.on(_RULE):
            return
        cached = len(self._trace.tensor(after, "cached"))
        if cached:
            self._compare.report(self._place_of(event), _RULE, "slots in the cache after the flush", 0, cached)

    def _place_of(self, event: Event) -> Place:
        return Place(self._records[self._counts[event.at]], "iteration")


# Aborts that came inside a step: what the batch under way gave is the last that the request has.
#
# A running request that is aborted ends when its next result is looked at, with what that gave it. Results are looked at in
# the order in which their batches were launched, so that result follows from how many were looked at when the scheduler learned
# of the abort. With overlap one batch more may have been launched by then; what it gives is nobody's.


class Aborts(Rules):
    def begin(self) -> None:
        self._batch = {record.iteration: record.step for record in self._records if record.stage == "batch"}
        self._ended = self._context.ended

    @stages("abort")
    def came(self, _number: int, record: Record) -> None:
        """An abort: of a request that has not ended, and whose end the trace has."""
        name = record.request
        if name not in self._ended or self._ended[name][1].iteration <= record.iteration or not self._compare.on(_RULE):
            return
        number, ended = self._ended[name]
        place, index = Place(self._context.iterations[record.iteration], "iteration"), f"abort of {name} in its step"
        if not ended.numbers["aborted"]:
            self._compare.report(place, _RULE, index, "an aborted request", "one that finished")
            return
        own = self._context.work[name]
        last = self._last(own, record.numbers["read"])
        after = [one for one in own if last is not None and self._number(one) > self._number(last)]
        if len(after) > self._trace.header.engine.overlap:
            batches = f"its last result is of batch {self._number(last)}" if last is not None else "no result"
            self._compare.report(place, _RULE, index, batches, f"one of batch {self._number(after[-1])}")
        elif last is not None and not ended.numbers["dropped"]:
            tokens, given = len(self._trace.integers(number, "tokens")), self._count_tokens(name, last)
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
            behind = (one for one in own if self._number(one) > self._number(step))
            later = next((one for one in behind if one.stage == "prefill" and "mixed" not in one.numbers), None)
            if later is None:
                return step
            read = self._number(later)

    def _number(self, record: Record) -> int:
        """Of the batch of a record: one runs in an iteration."""
        return self._batch[record.iteration]

    def _count_tokens(self, name: str, last: Record) -> int:
        """How many tokens the request has with what this batch gave: up to its grammar's end, and past max_new_tokens."""
        request, numbers = self._case.request(name), last.numbers
        known = numbers["end"] if last.stage == "prefill" else numbers["new_seq_len"]
        tokens = known + 1 - len(request.prompt)
        emitted = self._trace.integers(self._ended[name][0], "tokens")
        over = None if request.grammar is None else end_of(request.grammar, emitted)
        return tokens if over is None else min(tokens, over + 1)


# Requests that the scheduler gave up for want of memory, though the pool has room for them: `schedule.events`.
#
# Where the pool is full, the engine retracts until one request is left, and aborts that one if even it has no room. That is
# right where the pool is too small for the request alone, and there is no answer for it then: judge.py says that it cannot
# tell. It is wrong where nobody holds what is missing: all else is the prefix cache's, which gives up its rows when they are
# asked for, at once or when their copy to the host is done.
#
# So nothing is said unless all of this is certain: the request ran, nobody aborted it, and it has no grammar, which may refuse
# a token; no other request has rows when its end is seen, nor ended then, nor was aborted about then; and the pool has as many
# rows as the engine may ask for in all, for all tokens that the request may have, and so has that of windows. Sessions, which
# keep rows, states, which have a pool of their own, adaptive steps, and the batches of a pipeline, which are several, are left
# out.

# Rounds that the engine may set rows aside for: two, asked for anew while those before are still there, and one that ran on.
_ROUNDS = 5


class GivenUp(Rules):
    """Judges requests of one trace that ended by an abort."""

    def begin(self) -> None:
        case, model = self._case, self._model
        self._aborts = [event for event in case.events if event.kind == "abort"]
        self._on = (
            model.numbers
            and not (model.keeping or case.sessions)
            and case.engine.sglang.adaptive is None
            and self._trace.header.engine.pp == 1
        )

    @stages("finished")
    def check_finished(self, _number: int, record: Record) -> None:
        if not self._on or not record.numbers["aborted"] or record.request in self._context.impossible:
            return
        request = self._case.request(record.request)
        if request.grammar is not None or request.id in {event.request for event in self._aborts}:
            return
        at = record.iteration
        seen = self._context.iterations[at]
        # rows that the engine may want for a request that gets all of its tokens, in whole pages; rather too many than too few
        rows, page = len(request.prompt) + request.max_new_tokens + _ROUNDS * round_slots(self._case), self._case.page_size
        total, most = seen.numbers["total"], -(-rows // page) * page
        fits = most <= min(total, seen.numbers.get("window_total", total))
        own = self._context.work[record.request]
        ran = bool(own) and own[-1].numbers.get("final", 1) == 1  # its prompt was whole, so that the engine had taken it in
        if fits and ran and self._alone(record, seen) and self._compare.on(_RULE):
            why = (
                f"It may have {most} rows at most, with what is set aside for rounds, and no other request has any: "
                f"of {total}, {seen.numbers['available']} are free, and the others the prefix cache's."
            )
            index = f"end of {record.request}"
            self._compare.report(Place(seen, "iteration"), _RULE, index, "one that finished", "an abort", why)

    def _alone(self, record: Record, seen: Record) -> bool:
        """Whether no other request can have had rows when it was aborted, in the iteration before its end is seen. seen: the
        record of that one."""
        at = record.iteration
        others = any(one.iteration == at and name != record.request for name, (_, one) in self._context.ended.items())
        aborts = any(at - 1 <= event.at <= at for event in self._aborts)
        held = self._trace.integers(self._context.numbers[seen.key], "held")
        return not (seen.numbers["live"] or held or others or aborts)
