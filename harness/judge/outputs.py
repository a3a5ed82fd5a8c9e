"""What a request's answer says beside its tokens: `output.finish`, `output.counts`, `output.stream`.

Called by requests.py; logprobs.py judges the probabilities that it asked for.

All of it follows from the request, and from the steps that the trace shows. A step is the end of a prefill, which gives one
token, or a round of verify. What a step gave is lost where the request was retracted before its result was read, as happens
under overlap: the prefill that follows ends before it. A round that began when the request had all its tokens gave it none;
under overlap there is one. Neither counts.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise, zip_longest
from typing import NamedTuple

import numpy as np

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.case import Request
from eagletwin.harness.core.records import UNSAID, Finish, Record
from eagletwin.harness.core.trace import Trace

from .compare import Compare, Place
from .logprobs import Told
from .model import Model
from .prefix_cache import restored
from .replay import RequestReplay
from .request_logits import end_of

# The hidden states that a request was given: `output.hidden`.
#
# The token at place p was chosen by the target's row p - 1: the state of that row is the token's. It is what the head that
# makes logits reads, after the final norm, or what the target hands on before it (Step-3.5): the same as without a draft. The
# first token has the states of its prompt as well, from the first row that was computed for it: SGLang keeps no states of rows
# in the prefix cache. A retraction computes rows again, and gives no state anew. A request with max_new_tokens 0 is given what
# would come with its first token.
#
# A message of no tokens may hold the prompt's rows so far: they are the first token's, and the client keeps what the last
# message holds. SGLang sends such messages where a request is retracted before the token of its prefill was counted.

_RULE = "output.hidden"


class Given:
    """Judges the states that requests were given."""

    def __init__(self, trace: Trace, replays: dict[str, RequestReplay], compare: Compare) -> None:
        self._trace, self._stories, self._compare = trace, replays, compare

    def finished(self, number: int, record: Record, request: Request, own: Sequence[Record], emitted: int) -> None:
        """A request has ended. own: the records of its prefills and rounds; emitted: how many tokens it was sent."""
        place, wanted = Place(record, "finished"), request.hidden_states
        unsent = bool(wanted) and not (request.max_new_tokens or emitted or record.numbers["aborted"])
        emitted += unsent
        given = "given_hidden" in record.tensors
        if given != bool(wanted and emitted):
            if self._compare.on(_RULE):
                nothing = "none: it was sent nothing" if wanted else "none: they were not asked for"
                expected = "those that were asked for" if wanted and emitted else nothing
                self._compare.report(place, _RULE, "hidden states", expected, "some" if given else "none")
            return
        replay, prompt = self._stories[request.id], len(request.prompt)
        if not given or replay.target_rows is None or replay.target.given is None:
            return
        states = replay.target.given[: prompt - 1 + emitted]
        if len(states) < prompt - 1 + emitted:
            return  # a divergence of output.tokens
        first, entries, shown = len(states) - 1, [-1], self._trace.integers(number, "given_entries")
        if wanted == "all":
            first = self._computed_from(own, shown[0], prompt)
            entries = [prompt - first, *[-1] * (emitted - 1)]
        self._compare.integers(place, _RULE, entries, shown, "rows (-1: a row itself) of item", 0)
        if shown == entries:
            self._rows(number, place, "given", states[first:], lambda n: f"hidden state of row {first + n}")
        ends = {record.numbers["end"] for record in own if record.stage == "prefill"}
        read = states[[end - 1 for end in sorted(ends) if end <= prompt]]
        self._messages(number, record, wanted == "all", states[prompt - 1 :], unsent, read)

    def _messages(self, number: int, record: Record, every: bool, states: Array, unsent: bool, read: Array) -> None:
        """What each message had. states: of each token; unsent: of one token that is not sent, as well; read: of the prompt,
        those that its prefills ended with."""
        if "sent" not in record.tensors:
            return
        place = Place(record, "finished")
        so_far = self._trace.array(number, "sent").reshape(-1, 3)[:, 0].cumsum().tolist()
        so_far[-1:] = [count + unsent for count in so_far[-1:]]
        entries = [count if every else min(count, 1) for count in so_far]
        counts = self._trace.integers(number, "given_counts")
        early = counts[: len(entries)] if len(read) else []
        entries = [count or min(shown, 1) for count, shown in zip_longest(entries, early, fillvalue=0)]
        self._compare.integers(place, _RULE, entries, counts, "entries of message", 0)
        if counts == entries:
            told = [tokens for tokens, count in zip(so_far, counts, strict=True) if count]
            shown = np.split(self._trace.array(number, "last_hidden"), self._trace.array(number, "last_widths").cumsum()[:-1])
            lasts = [states[n - 1] if n else _nearest(read, row) for n, row in zip(told, shown, strict=True)]
            self._rows(number, place, "last", np.array(lasts), lambda n: f"last hidden state of message {n}")

    def _rows(self, number: int, place: Place, name: str, expected: Array, row: Callable[[int], str]) -> None:
        widths = self._trace.integers(number, f"{name}_widths")
        wide = [expected.shape[1]] * len(expected)
        self._compare.integers(place, _RULE, wide, widths, f"numbers of {name} hidden state", 0)
        if widths == wide:
            actual = self._trace.array(number, f"{name}_hidden").reshape(expected.shape)
            self._compare.floats(place, _RULE, expected, actual, row)

    def _computed_from(self, own: Sequence[Record], rows: int, prompt: int) -> int:
        """The first row that was computed by the prefill that gave the first token; own: all of the request. Where a retraction
        between two chunks may have left the first ones in the prefix cache, `rows`, of the prompt that were given, decide."""
        chunks = [record for record in own if record.stage == "prefill"]
        # the last one: under overlap a retraction may drop what an earlier one gave
        ends = [n for n, record in enumerate(chunks) if record.numbers["final"] and record.numbers["end"] == prompt]
        last = ends[-1] if ends else 0
        if not chunks:
            return 0
        case, possible = self._trace.header.case, [chunks[last].numbers["start"]]
        for before, record in reversed(list(pairwise(chunks[: last + 1]))):
            if before.numbers["end"] != record.numbers["start"]:
                break
            retracted = any(
                event.kind == "retract" and before.iteration < event.at <= record.iteration for event in case.events
            )
            if not (retracted and case.engine.sglang.radix_cache):
                possible.pop()
            possible.append(before.numbers["start"])
        return prompt - rows if prompt - rows in possible else possible[-1]


def _nearest(rows: Array, shown: Array) -> Array:
    """Of rows [R, N] the one that is nearest to what was shown; the first one where that has another width."""
    return min(rows, key=lambda row: float(np.abs(row - shown).max())) if rows.shape[1:] == shown.shape else rows[0]


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

    def __init__(self, trace: Trace, replays: dict[str, RequestReplay], compare: Compare, model: Model) -> None:
        self._trace, self._compare, self._model = trace, compare, model
        self._requests = {request.id: request for request in trace.header.case.requests}
        self._told = Told(trace, replays, compare)
        self._given = Given(trace, replays, compare)
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
