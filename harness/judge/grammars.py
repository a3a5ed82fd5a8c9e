"""Requests with grammars: `grammar.mask` and `output.grammar`. Called by requests.py.

A mask says which tokens a forward may give, of each row whose logits a token is chosen by. A row that nothing can reach is not
looked at: a node whose path leaves the grammar, ends it or is written as the backend does not allow, and what comes after it.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.grammar import word
from eagletwin.harness.core.trace import Trace

from .compare import Compare, Place
from .model import Model
from .replay import RequestReplay, Round
from .request_logits import allowed, end_of, text_of

_MASK, _OUTPUT = "grammar.mask", "output.grammar"


class Grammars:
    """Judges what the requests of one trace were allowed, and what they got. A recording of a server tells neither."""

    def __init__(self, trace: Trace, compare: Compare, model: Model) -> None:
        self._trace, self._compare, self._size = trace, compare, model.vocab_size
        self._grammars = {request.id: request.grammar for request in trace.header.case.requests}
        self._backend = trace.header.case.engine.sglang.grammar_backend
        self._under_way = int(trace.header.engine.overlap)
        self._late = Counter[str]()  # rounds that began behind the end, by request
        self._any = trace.header.case.constrains and model.numbers

    def prefill(self, number: int, place: Place, replay: RequestReplay) -> None:
        """The one row that a prefill's token is chosen by, and the token."""
        if self._any:
            sent = replay.tokens[len(replay.prompt) : place.record.numbers["end"]]
            self._masked(number, place, [sent], "after the prefill")
            with self._compare.looking_away(replay.impossible == place.record.numbers["end"] - 1):
                self.given(place, sent, self._trace.integers(number, "next_token")[0], "token of the prefill")

    def verify(self, number: int, place: Place, replay: RequestReplay, round: Round, parents: Sequence[int] | None) -> None:
        """The nodes of a round, whose parents [D] these are."""
        if not self._any or parents is None:
            return
        self._over(place, replay.tokens[len(replay.prompt) : round.committed + 1])
        paths = [replay.tokens[len(replay.prompt) : round.committed + 1]]
        for node, parent in enumerate(parents[1:], 1):
            paths.append([*paths[parent], round.drafted[node - 1]])
        self._masked(number, place, paths, "after node")

    def _over(self, place: Place, sent: list[int]) -> None:
        """No round begins behind the end of a text; under overlap one is under way when the end is seen."""
        grammar = self._grammars[place.record.request]
        end = None if grammar is None else end_of(grammar, sent)
        if end is None or not self._compare.on(_OUTPUT):
            return
        self._late[place.record.request] += 1
        if self._late[place.record.request] > self._under_way:
            self._compare.report(
                Place(place.record, "draft", step=-1),
                _OUTPUT,
                "the round",
                f"none: token {end} has ended the text",
                "a further round",
            )

    def given(self, place: Place, sent: Sequence[int], token: int, name: str) -> None:
        """A token that a forward gave, after these."""
        grammar = self._grammars[place.record.request]
        if grammar is None or not self._any or not self._compare.on(_OUTPUT):
            return
        text = text_of(grammar, sent, self._backend)
        if text is None or (0 <= token < self._size and allowed(grammar, text, self._size, self._backend)[token]):
            return
        own = f"{token}, {word(token)!r}" if word(token) else f"{token}, an end"
        self._compare.report(place, _OUTPUT, name, f"one that goes on with {text!r}, or ends it", own)

    def ended(self, place: Place, committed: list[int], emitted: list[int]) -> None:
        """The token that ends a text is the last that is sent."""
        grammar = self._grammars[place.record.request]
        if grammar is None or not self._any or not self._compare.on(_OUTPUT):
            return
        end = end_of(grammar, committed)
        if end is not None and end + 1 < len(emitted):
            expected = f"{end + 1}: its last token ends the text"
            self._compare.report(place, _OUTPUT, "length of the output", expected, len(emitted))

    def _masked(self, number: int, place: Place, paths: list[list[int]], rows: str) -> None:
        """paths: of each row what was sent before it, if it gives a token."""
        if not self._compare.on(_MASK):
            return
        grammar, applied = self._grammars[place.record.request], "allowed" in place.record.tensors
        if grammar is None and not applied:
            return
        every: Array = np.ones((len(paths), self._size), bool)
        actual = self._trace.array(number, "allowed").astype(bool) if applied else every
        if actual.shape != every.shape:
            self._compare.report(place, _MASK, "shape", every.shape, actual.shape)
            return
        for row, (sent, own) in enumerate(zip(paths, actual, strict=True)):
            text = None if grammar is None else text_of(grammar, sent, self._backend)
            if grammar is not None and text is None:
                continue
            expected = every[0] if grammar is None or text is None else allowed(grammar, text, self._size, self._backend)
            if (wrong := np.flatnonzero(expected != own)).size:
                token = int(wrong[0])
                meaning = f"token {token} ({word(token)!r})" if word(token) else f"token {token} (an end)"
                more = f", and {wrong.size - 1} more" if wrong.size > 1 else ""
                index = f"{meaning} {rows} {row}{more}" if len(paths) > 1 else f"{meaning} {rows}{more}"
                said = ("refused", "allowed") if own[token] else ("allowed", "refused")
                self._compare.report(place, _MASK, index, *said, "" if applied else "No mask was applied.")
                return


# Requests that ask for what cannot be: their grammar, processor, bias and min_new_tokens together allow no token somewhere.
#
# No token is right there, and what comes behind it follows from whichever an engine gave. SGLang's grammar may refuse that one,
# and the request is aborted; or take it, and the request goes on. So nothing of such a request is judged from that token on,
# and the verdict says so. What comes before is judged as of any request, and so is what the scheduler and other requests do.


class Impossible(NamedTuple):
    """number: of the prefill or verify record that gave a token where none is allowed; token: which output token that is."""

    number: int
    token: int


def impossible(trace: Trace, replays: dict[str, RequestReplay]) -> dict[str, Impossible]:
    """By request; of those that ask for nothing impossible there is nothing."""
    found = dict[str, Impossible]()
    for number, record in enumerate(trace.header.records):
        replay = replays.get(record.request)
        if replay is None or replay.impossible is None or record.request in found:
            continue
        if record.stage == "prefill" and record.numbers["final"]:
            end = record.numbers["end"]
        elif record.stage == "verify":
            end = replay.rounds[record.round].end
        else:
            continue
        if end > replay.impossible:
            found[record.request] = Impossible(number, replay.impossible + 1 - len(replay.prompt))
    return found
