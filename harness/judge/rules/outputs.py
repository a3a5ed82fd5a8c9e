"""What a request's answer says beside its tokens: `output.finish`, `output.counts`, `output.logprobs`.

All of it follows from the request, and from the steps that the trace shows. A step is the end of a prefill, which gives one
token, or a round of verify. What a step gave is lost where the request was retracted before its result was read, as happens
under overlap: the prefill that follows ends before it. A round that began when the request had all its tokens gave it none;
under overlap there is one. Neither counts.
"""

from collections import Counter
from typing import NamedTuple

import numpy as np
import torch

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.case import Logprobs, Request
from eagletwin.harness.core.records import UNSAID, Finish, Record

from ..bounds import log_scale
from ..compare import Place
from ..context import Rules
from ..replay import RequestReplay
from ..request_logits import end_of
from . import rule, stages
from .cached_rows import restored_rows

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
        self._restored = restored_rows(self._trace)

    def has_message(self, record: Record) -> bool:
        """Whether a request got a message with counts: one that was aborted in the queue gets another."""
        return self._model.numbers and not record.numbers.get("dropped")

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
        request, steps, own = self._case.request(record.request), list[_Step](), self._context.work[record.request]
        prompt, limit = len(request.prompt), self._limit(request, record, emitted)
        surely, perhaps, before = 0, 0, None
        for done in own:
            numbers = done.numbers
            if done.stage == "verify":
                first, last = numbers["seq_len"] + 1 - prompt, numbers["new_seq_len"] + 1 - prompt
                counts = self._engine.counts_all or numbers.get("steps") != 0
                steps.append(_Step(first, last, numbers["accept_len"] - 1 if counts else None))
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
                    steps.append(_Step(known, known + 1, 0 if numbers.get("padded") and not self._engine.counts_all else None))
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
        return case.prefix_cache and any(before.iteration < at <= record.iteration for at in events)

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


# What a request was told of the probabilities of tokens: `output.logprobs`.
#
# The place p of a text is judged by the target's row p - 1. Of the prompt it is the log_softmax of that row as it is: neither
# a temperature nor what a request wants added to its logits changes what the prompt was. The engine says nothing of the first
# place that was asked for, whatever stands before it. A request with max_new_tokens 0 is told of the token that would have
# been its first, which it is not sent: the engine's scores of prompts are made of that.

_RULE = "output.logprobs"
_LEAST = float(np.finfo(np.float32).min)  # what the engine says of a token that cannot come
# Probabilities below the smallest normal float32 are whole numbers of steps, and 0 below half of one.
_NORMAL, _STEP = float(np.log(np.finfo(np.float32).tiny)), float(np.finfo(np.float32).smallest_subnormal)


class _Places(NamedTuple):
    """Places of a text, of which the first is number `first`, and what must be said of them.

    part    as a trace calls it: input or output
    tokens  that stand there
    silent  how many of the first say nothing
    drawn   [n]: whether the logarithm is one of a probability in float32, and not log_softmax's own: of a request that samples,
            and in a prefill of one that is greedy next to one that samples
    logits  [n, V] by which the others were chosen, or would have been
    """

    part: str
    first: int
    tokens: list[int]
    silent: int
    drawn: Array
    logits: Array


class LogprobRules(Rules):
    @rule("output.logprobs", "3.9", weights="in part")
    @stages("finished")
    def check_logprobs(self, number: int, record: Record) -> None:
        """Of each token that a request is sent, and of the prompt's from where it asks, it is told the logarithm of its
        probability, of the best tokens there and of those that it names: the log_softmax of the target's row before it, for
        what is sent of that row's logits as the request wants them changed, divided by its temperature."""
        if not self._context.of(Answers).has_message(record):
            return
        request, emitted = self._case.request(record.request), self._trace.integers(number, "tokens")
        place, wanted = Place(record, "finished"), request.logprobs
        if wanted is None:
            if "logprobs_sent" in record.tensors and self._compare.on(_RULE):
                self._compare.report(place, _RULE, "logprobs", "none: they were not asked for", "some")
            return
        replay, unsent = self._replay(record), 0
        if not (request.max_new_tokens or emitted or record.numbers["aborted"]):
            emitted = replay.tokens[len(request.prompt) :][:1]
            unsent = len(emitted)
        if replay.target_rows is None or len(replay.target.logits) < len(request.prompt) - 1 + len(emitted):
            return  # a divergence of output.tokens
        if "logprobs_sent" not in record.tensors:
            if emitted and self._compare.on(_RULE):
                self._compare.report(place, _RULE, "logprobs", "those that were asked for", "none")
            return
        for places in self._places(replay, request, wanted, emitted):
            self._judge(number, place, places, wanted)
        if "sent" in record.tensors:
            sent = self._trace.array(number, "sent").reshape(-1, 3)[:, 0].tolist()
            sent[-1:] = [last + unsent for last in sent[-1:]]
            told = self._trace.integers(number, "logprobs_sent")
            self._compare.integers(place, _RULE, sent, told, "tokens that have a logprob in message", 0)

    def _places(self, replay: RequestReplay, request: Request, wanted: Logprobs, emitted: list[int]) -> list[_Places]:
        prompt, sampling = request.prompt, self._case.sampling_of(request.id)
        first = len(prompt) if wanted.start < 0 else wanted.start
        rows = replay.target.logits
        of_prompt, sent = rows[first : len(prompt) - 1], rows[len(prompt) - 1 : len(prompt) - 1 + len(emitted)]
        drawn = (
            self._places_next_to_sampling(request.id) if sampling is None else set(range(len(prompt), len(prompt) + len(sent)))
        )
        silent, of_softmax = min(1, len(prompt) - first), np.zeros(len(of_prompt), bool)
        beside = np.array([len(prompt) + n in drawn for n in range(len(sent))], bool)
        return [
            _Places("input", first, list(prompt[first:]), silent, of_softmax, of_prompt),
            _Places("output", len(prompt), emitted, 0, beside, sent if sampling is None else sent / sampling.temperature),
        ]

    def _places_next_to_sampling(self, name: str) -> set[int]:
        """Places whose tokens prefills of a greedy request gave next to one that samples: the engine takes the softmax of
        all."""
        prefills = [record for record in self._records if record.stage == "prefill"]
        sampled = {record.forward for record in prefills if self._case.sampling_of(record.request) is not None}
        return {record.numbers["end"] for record in prefills if record.request == name and record.forward in sampled}

    def _judge(self, number: int, place: Place, places: _Places, wanted: Logprobs) -> None:
        told = np.maximum(torch.from_numpy(places.logits).log_softmax(-1).numpy(), _LEAST)
        speaking = places.tokens[places.silent :]
        kinds: dict[str, list[list[int]] | None] = {"token": [[token] for token in speaking]}  # tokens of each place
        if wanted.tokens:
            kinds["token_ids"] = [list(wanted.tokens) for _ in speaking]
        if wanted.top:
            kinds["top"] = None  # the best ones, within what the reference can tell
        counts = {"token": 1, "token_ids": len(wanted.tokens), "top": wanted.top}
        for kind in counts.keys() - kinds.keys():
            self._nothing(number, place, f"{places.part}_{kind}_logprobs")
        for kind, named in kinds.items():
            tensor = f"{places.part}_{kind}_logprobs"
            # of each place how many numbers, -1 for nothing; and all numbers, one place after another
            of_values, of_ids = (self._trace.integers(number, f"{tensor}_{which}_rows") for which in ("values", "ids"))
            values, ids = self._trace.array(number, tensor), self._trace.array(number, f"{tensor}_ids")
            name = f"{places.part} {kind} logprobs"
            rows = [*[-1] * places.silent, *[counts[kind]] * len(speaking)]
            # the token itself is named where nothing is said of its probability, too
            shown = [1] * len(places.tokens) if kind == "token" else rows
            self._compare.integers(place, _RULE, rows, of_values, f"how many {name} of place", places.first)
            self._compare.integers(place, _RULE, shown, of_ids, f"how many ids of {name} of place", places.first)
            if (of_values, of_ids) != (rows, shown):
                continue
            chosen = ids if kind != "token" else ids[places.silent :]
            if named is None:
                self._best(place, places, chosen.reshape(-1, wanted.top), name)
            else:
                expected = places.tokens if kind == "token" else [token for row in named for token in row]
                self._compare.integers(place, _RULE, expected, ids.tolist(), f"id of {name}", 0)
            chosen = chosen.reshape(-1, counts[kind]).clip(0, told.shape[1] - 1)
            if len(chosen):
                self._values(place, places, np.take_along_axis(told, chosen, 1), values.reshape(chosen.shape), name)

    def _nothing(self, number: int, place: Place, name: str) -> None:
        """What nobody asked for is not told, as of another request."""
        for kept in (name, f"{name}_ids"):
            if kept in self._records[number].tensors:
                some = self._trace.integers(number, kept) if kept.endswith("_ids") else self._trace.array(number, kept).tolist()
                self._compare.integers(place, _RULE, [], some, f"{kept}, which were not asked for, of place", 0)

    def _best(self, place: Place, places: _Places, chosen: Array, name: str) -> None:
        if not len(chosen):
            return
        begin, logits = places.first + places.silent, places.logits
        if places.drawn.any():  # a prefill's probabilities that are no normal float32 may all be 0: none is the better one
            least = torch.from_numpy(logits).logsumexp(-1, keepdim=True).numpy() + _NORMAL
            logits = np.where(places.drawn[:, None], np.maximum(logits, least), logits)
        self._compare.choices(
            place, _RULE, logits, chosen.tolist(), lambda row, rank: f"{name} of place {begin + row}, rank {rank}"
        )

    def _values(self, place: Place, places: _Places, expected: Array, actual: Array, name: str) -> None:
        begin, scale = places.first + places.silent, log_scale(places.logits)
        if places.drawn.any():
            said = in_steps(expected, actual, self._bounds.relative * scale[:, None])
            expected = np.where(places.drawn[:, None], said, expected)
        self._compare.floats(place, _RULE, expected, actual, lambda row: f"{name} of place {begin + row}", scale)


def in_steps(expected: Array, actual: Array, error: Array) -> Array:
    """The logarithms that are expected, and in place of those of probabilities that are no normal float32 the actual ones,
    where these are of a step beside, or of 0: kernels may flush such numbers. error: how far off a logarithm may be for
    another reason [rows, 1]."""
    said, step = np.exp(actual), _STEP * (1 + 1e-6)  # the logarithm of a number of steps is rounded itself
    beside = (said >= np.exp(expected - error) - step) & (said <= np.exp(expected + error) + step)
    found: Array = np.where((expected < _NORMAL) & (beside | (said == 0)), actual, expected)
    return found
