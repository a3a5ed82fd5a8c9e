"""The messages that a request was sent: the hidden states in them, `output.hidden`, and the tokens, `output.stream`."""

from collections.abc import Callable, Sequence
from itertools import pairwise, zip_longest

import numpy as np

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.records import Record

from ..compare import Place
from ..context import Rules
from . import rule, stages
from .outputs import Answers

# The hidden states that a request was given: `output.hidden`.
#
# The token at place p was chosen by the target's row p - 1: the state of that row is the token's. It is what the head that
# makes logits reads, after the final norm, or what the target hands on before it (Step-3.5): the same as without a draft. The
# first token has the states of its prompt as well, from the first row that was computed for it: the engine keeps no states of
# rows in the prefix cache. A retraction computes rows again, and gives no state anew. A request with max_new_tokens 0 is given
# what would come with its first token.
#
# A message of no tokens may hold the prompt's rows so far: they are the first token's, and the client keeps what the last
# message holds. The engine sends such messages where a request is retracted before the token of its prefill was counted.

_RULE = "output.hidden"


class HiddenStates(Rules):
    @rule("output.hidden", "3.9", weights="in part")
    @stages("finished")
    def check_states(self, number: int, record: Record) -> None:
        """A request that asks for hidden states is given those of the target that its tokens were chosen by: for its first
        token those of all rows of its prompt that were computed, and one for each other token; or the last token's alone."""
        if not self._context.of(Answers).has_message(record):
            return
        request, own = self._case.request(record.request), self._context.work[record.request]
        place, wanted = Place(record, "finished"), request.hidden_states
        emitted = len(self._trace.integers(number, "tokens"))
        unsent = bool(wanted) and not (request.max_new_tokens or emitted or record.numbers["aborted"])
        emitted += unsent
        given = "given_hidden" in record.tensors
        if given != bool(wanted and emitted):
            if self._compare.on(_RULE):
                nothing = "none: it was sent nothing" if wanted else "none: they were not asked for"
                expected = "those that were asked for" if wanted and emitted else nothing
                self._compare.report(place, _RULE, "hidden states", expected, "some" if given else "none")
            return
        replay, prompt = self._replay(record), len(request.prompt)
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
        case, possible = self._case, [chunks[last].numbers["start"]]
        for before, record in reversed(list(pairwise(chunks[: last + 1]))):
            if before.numbers["end"] != record.numbers["start"]:
                break
            retracted = any(
                event.kind == "retract" and before.iteration < event.at <= record.iteration for event in case.events
            )
            if not (retracted and case.prefix_cache):
                possible.pop()
            possible.append(before.numbers["start"])
        return prompt - rows if prompt - rows in possible else possible[-1]


def _nearest(rows: Array, shown: Array) -> Array:
    """Of rows [R, N] the one that is nearest to what was shown; the first one where that has another width."""
    return min(rows, key=lambda row: float(np.abs(row - shown).max())) if rows.shape[1:] == shown.shape else rows[0]


_STREAM = "output.stream"


class Stream(Rules):
    @rule("output.stream", "3.9", weights="no")
    @stages("finished")
    def check_messages(self, number: int, record: Record) -> None:
        """Each token is sent once, in order, and to the detokenizer the same; completion_tokens counts what was sent. A
        streamed request is sent the tokens of each step in a message of their own."""
        if not self._context.of(Answers).has_message(record):
            return
        if "sent" not in record.tensors:
            self._compare.not_seen((_STREAM,), 1)
            return
        place, request = Place(record, "finished"), self._case.request(record.request)
        emitted = self._trace.integers(number, "tokens")
        work = self._context.of(Answers).work(record, emitted)
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
