"""What a request's answer says beside its tokens: `output.finish`, `output.counts`, `output.stream`. Called by requests.py;
logprobs.py and hidden_states.py judge what it asked for.

All of it follows from the request, and from the steps that the trace shows. A step is the end of a prefill, which gives one
token, or a round of verify. What a step gave is lost where the request was retracted before its result was read, as happens
under overlap: the prefill that follows ends before it. A round that began when the request had all its tokens gave it none;
under overlap there is one. Neither counts.
"""

from collections import Counter
from typing import NamedTuple

from eagletwin.harness.core.answers import UNSAID, Finish
from eagletwin.harness.core.case import Request
from eagletwin.harness.core.records import Record
from eagletwin.harness.core.trace import Trace

from .compare import Compare, Place
from .constraints import end_of
from .hidden_states import Given
from .host_rows import restored
from .logprobs import Told
from .model import Model
from .story import Story

_FINISH, _COUNTS, _STREAM = "output.finish", "output.counts", "output.stream"


class _Step(NamedTuple):
    """How many tokens the request had before it and after it; drafts: that its verify accepted, None of a prefill."""

    before: int
    after: int
    drafts: int | None


class _Work(NamedTuple):
    """What was done for a request.

    steps      that gave it tokens
    cached     where its first chunk began
    restored   of those rows how many came back from the host
    restarts   prefills that began anew: surely, and at most
    """

    steps: list[_Step]
    cached: int
    restored: int
    restarts: tuple[int, int]


class Answers:
    """Judges what was sent of each request of one trace. A recording of a server has no messages."""

    def __init__(self, trace: Trace, stories: dict[str, Story], compare: Compare, model: Model) -> None:
        self._trace, self._compare, self._model = trace, compare, model
        self._requests = {request.id: request for request in trace.header.case.requests}
        self._told = Told(trace, stories, compare)
        self._given = Given(trace, stories, compare)
        self._own: dict[str, list[Record]] = {}
        self._restored = restored(trace)
        for record in trace.header.records:
            if record.stage in ("prefill", "verify"):
                self._own.setdefault(record.request, []).append(record)

    def finished(self, number: int, record: Record) -> None:
        """A request has ended. One that was aborted in the queue gets a message of another kind, without counts."""
        if not self._model.numbers or record.numbers.get("dropped"):
            return
        request, emitted = self._requests[record.request], self._trace.integers(number, "tokens")
        work = self._work(request, self._limit(request, record, emitted), record.numbers)
        self._finish(record, request, emitted)
        self._counts(number, record, work, len(emitted))
        self._told.finished(number, record, request, emitted)
        self._given.finished(number, record, request, self._own.get(request.id, []), len(emitted))
        if "sent" in record.tensors:
            self._stream(number, record, work, emitted)
        else:
            self._compare.not_seen((_STREAM,), 1)

    def _limit(self, request: Request, record: Record, emitted: list[int]) -> int:
        """How many tokens it was to have: all that it got, where it was aborted."""
        if record.numbers["aborted"]:
            return len(emitted)
        stop = self.end(request, emitted)
        return request.max_new_tokens if stop is None else min(stop + 1, request.max_new_tokens)

    def end(self, request: Request, emitted: list[int]) -> int | None:
        """Where the first token stands that is to end it: one of its stop tokens, or one that ends its grammar's text."""
        ends = {*request.stop, *self._model.ends} if request.stop else set[int]()
        stop = next((n for n, token in enumerate(emitted) if token in ends), None)
        over = None if request.grammar is None else end_of(request.grammar, emitted)
        return min((at for at in (stop, over) if at is not None), default=None)

    def _work(self, request: Request, limit: int, told: dict[str, int]) -> _Work:
        prompt, steps = len(request.prompt), list[_Step]()
        own = self._own.get(request.id, [])
        surely, perhaps, before = 0, 0, None
        for record in own:
            numbers = record.numbers
            if record.stage == "verify":
                first, last = numbers["seq_len"] + 1 - prompt, numbers["new_seq_len"] + 1 - prompt
                steps.append(_Step(first, last, numbers["accept_len"] - 1))
            else:
                mixed = "mixed" in numbers  # one token more, next to the prefill of others
                goes_on = before is None or (
                    before.stage == "prefill" and not before.numbers["final"] and before.numbers["end"] == numbers["start"]
                )  # behind the last chunk nothing goes on: a session keeps all rows of a request that is retracted there
                surely += not (mixed or goes_on)
                perhaps += before is not None and goes_on and not mixed and self._may_come_back(before, record)
                if numbers["final"]:
                    known = numbers["end"] - prompt
                    steps = [step for step in steps if step.after <= known]
                    steps.append(_Step(known, known + 1, None))
            before = record
        cached = own[0].numbers["start"] if own else 0
        restored = self._restored.get((request.id, own[0].iteration), 0) if own else 0
        if restored is None:  # how far the hit would have gone without the host, the trace does not say
            restored = min(max(told.get("cached_host", 0), 0), cached)
        return _Work([step for step in steps if step.before < limit], cached, restored, (surely, surely + perhaps))

    def _may_come_back(self, before: Record, record: Record) -> bool:
        """Whether a chunk that begins where the one before it ended may be the first after a retraction between the two: the
        prefix cache may have all that was prefilled."""
        case = self._trace.header.case
        events = (event.at for event in case.events if event.kind == "retract")
        return case.engine.sglang.radix_cache and any(before.iteration < at <= record.iteration for at in events)

    def _finish(self, record: Record, request: Request, emitted: list[int]) -> None:
        numbers, place = record.numbers, Place(record, "finished")
        if "finish" not in numbers:
            self._compare.not_seen((_FINISH,), 1)
            return
        if not self._compare.on(_FINISH):
            return
        stop, kind = self.end(request, emitted), Finish(numbers["finish"])
        allowed: dict[Finish, tuple[str, int]] = {}  # kind -> the number that goes with it, by name
        if numbers["aborted"]:
            allowed[Finish.ABORT] = "", -1
        else:
            if stop is not None and stop + 1 == len(emitted):
                allowed[Finish.STOP] = "matched", emitted[stop]
            if len(emitted) == request.max_new_tokens:
                allowed[Finish.LENGTH] = "length", request.max_new_tokens
        if kind not in allowed:
            expected = " or ".join(one.name.lower() for one in allowed) or "none: it has not ended"
            self._compare.report(place, _FINISH, "finish reason", expected, kind.name.lower())
            return
        name, value = allowed[kind]
        if name and numbers[f"finish_{name}"] != value:
            self._compare.report(place, _FINISH, f"finish reason's {name}", value, numbers[f"finish_{name}"])

    def _counts(self, number: int, record: Record, work: _Work, emitted: int) -> None:
        """Of an integer each, and of the histogram."""
        drafts = [step.drafts for step in work.steps if step.drafts is not None]
        least, most = work.restarts
        expected = {
            "prompt_tokens": len(self._requests[record.request].prompt),
            "completion_tokens": emitted,
            "cached_tokens": work.cached,
            "cached_device": work.cached - work.restored,
            "cached_host": work.restored,
            "verify_ct": len(drafts),
            "correct_drafts": sum(drafts),
            "retractions": min(max(record.numbers.get("retractions", 0), least), most),
        }
        place = Place(record, "finished")
        for name, value in expected.items():
            counted = record.numbers.get(name, UNSAID)
            if counted != UNSAID:
                self._compare.integers(place, _COUNTS, [value], [counted], f"{name}, request", 0)
            elif value or name not in ("cached_device", "cached_host"):  # of a request with nothing cached nobody tells where
                self._compare.not_seen((_COUNTS,), 1)
        if "histogram" not in record.tensors:
            self._compare.not_seen((_COUNTS,), 1)
            return
        tally = Counter(drafts)
        rounds = [tally[accepted] for accepted in range(max(tally, default=-1) + 1)]
        histogram = self._trace.integers(number, "histogram")
        self._compare.integers(place, _COUNTS, rounds, histogram, "rounds by accepted drafts, entry", 0)

    def _stream(self, number: int, record: Record, work: _Work, emitted: list[int]) -> None:
        place, request = Place(record, "finished"), self._requests[record.request]
        sent = self._trace.array(number, "sent").reshape(-1, 3)
        so_far = sent[:, 0].cumsum().tolist()
        counted = sent[:, 1].tolist()
        if all(count >= 0 for count in counted):
            self._compare.integers(place, _STREAM, so_far, counted, "completion_tokens of message", 0)
        else:
            self._compare.not_seen((_STREAM,), 1)
        # the detokenizer reads ids of its own, which begin with some of the prompt's
        decoded = self._trace.integers(number, "decoded")
        before = max(len(decoded) - len(emitted), 0)
        prompt = list(request.prompt[max(len(request.prompt) - before, 0) :])
        self._compare.integers(place, _STREAM, [*prompt, *emitted], decoded, "id for the detokenizer", -before)
        reads = sent[:, 2].cumsum().tolist()
        self._compare.integers(place, _STREAM, [before + count for count in so_far], reads, "ids up to message", 0)
        if request.stream:
            after = [min(step.after, len(emitted)) for step in work.steps]
            ends = record.numbers["aborted"] or not request.max_new_tokens
            if ends and so_far[-1:] == (so_far[-2:-1] or [0]):  # which says no more than that it ended
                so_far = so_far[:-1]
            self._compare.integers(place, _STREAM, after, so_far, "tokens up to message", 0)
