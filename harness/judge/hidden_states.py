"""The hidden states that a request was given: `output.hidden`. Called by answers.py.

The token at place p was chosen by the target's row p - 1: the state of that row is the token's. It is what the head that makes
logits reads, after the final norm, or what the target hands on before it (Step-3.5): the same as without a draft. The first
token has the states of its prompt as well, from the first row that was computed for it: SGLang keeps no states of rows in the
prefix cache. A retraction computes rows again, and gives no state anew. A request with max_new_tokens 0 is given what would
come with its first token.

A message of no tokens may hold the prompt's rows so far: they are the first token's, and the client keeps what the last
message holds. SGLang sends such messages where a request is retracted before the token of its prefill was counted.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise, zip_longest

import numpy as np

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.case import Request
from eagletwin.harness.core.records import Record
from eagletwin.harness.core.trace import Trace

from .compare import Compare, Place
from .story import Story

_RULE = "output.hidden"


class Given:
    """Judges the states that requests were given."""

    def __init__(self, trace: Trace, stories: dict[str, Story], compare: Compare) -> None:
        self._trace, self._stories, self._compare = trace, stories, compare

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
        story, prompt = self._stories[request.id], len(request.prompt)
        if not given or story.target_rows is None or story.target.given is None:
            return
        states = story.target.given[: prompt - 1 + emitted]
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
