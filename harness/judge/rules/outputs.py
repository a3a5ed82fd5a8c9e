"""What a request's answer says beside its tokens: `output.finish`, `output.counts`, `output.stream`.

logprobs.py judges the probabilities that it asked for.

All of it follows from the request, and from the steps that the trace shows. A step is the end of a prefill, which gives one
token, or a round of verify. What a step gave is lost where the request was retracted before its result was read, as happens
under overlap: the prefill that follows ends before it. A round that began when the request had all its tokens gave it none;
under overlap there is one. Neither counts.
"""

from collections import Counter
from typing import NamedTuple

from eagletwin.harness.core.case import Request
from eagletwin.harness.core.records import UNSAID, Finish, Record

from ..compare import Place
from ..context import Rules
from ..request_logits import end_of
from . import rule, stages
from .cached_rows import restored

_FINISH, _COUNTS = "output.finish", "output.counts"


class _Step(NamedTuple):
    """How many tokens the request had before it and after it; drafts: that its verify accepted, None of a prefill."""

    before: int
    after: int
    drafts: int | None


class Work(NamedTuple):
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


class Answers(Rules):
    """Judges what was sent of each request of one trace. A recording of a server has no messages."""

    def begin(self) -> None:
        self._own: dict[str, list[Record]] = {}
        self._restored = restored(self._trace)
        for record in self._records:
            if record.stage in ("prefill", "verify"):
                self._own.setdefault(record.request, []).append(record)

    def has_message(self, record: Record) -> bool:
        """Whether a request got a message with counts: one that was aborted in the queue gets another."""
        return self._model.numbers and not record.numbers.get("dropped")

    def work_on(self, request: str) -> list[Record]:
        """The records of its prefills and rounds."""
        return self._own.get(request, [])

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

    def work(self, record: Record, emitted: list[int]) -> Work:
        """What was done for a request that has ended, and was sent these tokens."""
        request, steps, own = self._case.request(record.request), list[_Step](), self.work_on(record.request)
        prompt, limit = len(request.prompt), self._limit(request, record, emitted)
        surely, perhaps, before = 0, 0, None
        for done in own:
            numbers = done.numbers
            if done.stage == "verify":
                first, last = numbers["seq_len"] + 1 - prompt, numbers["new_seq_len"] + 1 - prompt
                steps.append(_Step(first, last, numbers["accept_len"] - 1))
            else:
                mixed = "mixed" in numbers  # one token more, next to the prefill of others
                goes_on = before is None or (
                    before.stage == "prefill" and not before.numbers["final"] and before.numbers["end"] == numbers["start"]
                )  # behind the last chunk nothing goes on: a session keeps all rows of a request that is retracted there
                surely += not (mixed or goes_on)
                perhaps += before is not None and goes_on and not mixed and self._may_come_back(before, done)
                if numbers["final"]:
                    known = numbers["end"] - prompt
                    steps = [step for step in steps if step.after <= known]
                    steps.append(_Step(known, known + 1, None))
            before = done
        cached = own[0].numbers["start"] if own else 0
        restored = self._restored.get((request.id, own[0].iteration), 0) if own else 0
        if restored is None:  # how far the hit would have gone without the host, the trace does not say
            restored = min(max(record.numbers.get("cached_host", 0), 0), cached)
        return Work([step for step in steps if step.before < limit], cached, restored, (surely, surely + perhaps))

    def _may_come_back(self, before: Record, record: Record) -> bool:
        """Whether a chunk that begins where the one before it ended may be the first after a retraction between the two: the
        prefix cache may have all that was prefilled."""
        case = self._case
        events = (event.at for event in case.events if event.kind == "retract")
        return case.engine.sglang.radix_cache and any(before.iteration < at <= record.iteration for at in events)

    @rule("output.finish", "3.9", weights="no")
    @stages("finished")
    def finish(self, number: int, record: Record) -> None:
        """A request ends because it has max_new_tokens tokens, at the first of its stop tokens, with its grammar's text, or by
        an abort; its finish reason says which, with that length or token."""
        numbers, place = record.numbers, Place(record, "finished")
        if not self.has_message(record):
            return
        request, emitted = self._case.request(record.request), self._trace.integers(number, "tokens")
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

    @rule("output.counts", "3.9", weights="no")
    @stages("finished")
    def counts(self, number: int, record: Record) -> None:
        """The last message of a request counts its prompt's tokens, those that it was sent, those that its first prefill found
        in the prefix cache, its retractions, the rounds that gave it tokens, and the drafts that they accepted: all, and in
        how many rounds how many."""
        if not self.has_message(record):
            return
        emitted = self._trace.integers(number, "tokens")
        work = self.work(record, emitted)
        drafts = [step.drafts for step in work.steps if step.drafts is not None]
        least, most = work.restarts
        expected = {
            "prompt_tokens": len(self._case.request(record.request).prompt),
            "completion_tokens": len(emitted),
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
