"""Requests with grammars: `grammar.mask` and `output.grammar`.

A mask says which tokens a forward may give, of each row whose logits a token is chosen by. A row that nothing can reach is not
looked at: a node whose path leaves the grammar, ends it or is written as the backend does not allow, and what comes after it.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.grammar import word
from eagletwin.harness.core.records import Record

from ..compare import Place
from ..context import Rules
from ..request_logits import allowed_tokens, end_of, text_of
from ..trees import parents_of
from . import rule, stages

_MASK, _OUTPUT = "grammar.mask", "output.grammar"


class Grammars(Rules):
    """Judges what the requests of one trace were allowed, and what they got. A recording of a server tells neither."""

    def begin(self) -> None:
        self._size = self._model.vocab_size
        self._grammars = {request.id: request.grammar for request in self._case.requests}
        self._backend = self._case.engine.sglang.grammar_backend
        self._under_way = int(self._trace.header.engine.overlap)
        self._late = Counter[str]()  # rounds that began behind the end, by request
        self._any = self._case.constrains and self._model.numbers

    @rule("grammar.mask", "3.9", weights="no", also=("verify",))
    @stages("prefill")
    def prefill(self, number: int, record: Record) -> None:
        """A prefill, and each node of a verify whose path the grammar knows, may give the tokens that go on with the text so
        far, those that end it where it is whole, and no others; of a request without a grammar, all."""
        replay, end = self._replay(record), record.numbers["end"]
        if not (self._any and record.numbers["final"] and self._has_output(record)):
            return
        place = Place(record, "target.extend", output=True)
        sent = replay.tokens[len(replay.prompt) : end]
        self._check_mask(number, place, [sent], "after the prefill")
        with self._compare.looking_away(replay.impossible == end - 1):
            self._check_token(place, sent, self._trace.integers(number, "next_token")[0], "token of the prefill")

    @rule("output.grammar", "3.9", weights="no", also=("prefill", "finished"))
    @stages("verify")
    def verify(self, number: int, record: Record) -> None:
        """A request with a grammar gets tokens that go on with the text so far, or end it where it is whole; one that ends it
        is its last."""
        if not self._any:
            return
        replay, round, place = self._replay(record), self._round(record), Place(record, "verify")
        parents = parents_of(self._case, round)
        if parents is not None:
            self._over(place, replay.tokens[len(replay.prompt) : round.committed + 1])
            paths = [replay.tokens[len(replay.prompt) : round.committed + 1]]
            for node, parent in enumerate(parents[1:], 1):
                paths.append([*paths[parent], round.drafted[node - 1]])
            self._check_mask(number, place, paths, "after node")
        judged = len(replay.allowing(range(round.committed, round.end)))
        for n, token in enumerate(replay.tokens[round.committed + 1 : round.end + 1]):
            sent = replay.tokens[len(replay.prompt) : round.committed + 1 + n]
            with self._compare.looking_away(n >= judged):
                self._check_token(Place(record, "verify", n), sent, token, f"token committed after accepted node {n}")

    def _over(self, place: Place, sent: list[int]) -> None:
        """No round begins behind the end of a text; under overlap one is under way when the end is seen."""
        grammar = self._grammars[place.record.request]
        end = None if grammar is None else end_of(grammar, sent)
        if end is None or not self._compare.on(_OUTPUT):
            return
        self._late[place.record.request] += 1
        if self._late[place.record.request] > self._under_way:
            before, expected = Place(place.record, "draft", step=-1), f"none: token {end} has ended the text"
            self._compare.report(before, _OUTPUT, "the round", expected, "a further round")

    def _check_token(self, place: Place, sent: Sequence[int], token: int, name: str) -> None:
        grammar = self._grammars[place.record.request]
        if grammar is None or not self._any or not self._compare.on(_OUTPUT):
            return
        text = text_of(grammar, sent, self._backend)
        if text is None or (0 <= token < self._size and allowed_tokens(grammar, text, self._size, self._backend)[token]):
            return
        own = f"{token}, {word(token)!r}" if word(token) else f"{token}, an end"
        self._compare.report(place, _OUTPUT, name, f"one that goes on with {text!r}, or ends it", own)

    @stages("finished")
    def ended(self, number: int, record: Record) -> None:
        """The token that ends a text is the last that is sent."""
        grammar = self._grammars[record.request]
        cut = record.numbers["aborted"] or record.numbers.get("otherwise")
        if grammar is None or not self._any or cut or not self._compare.on(_OUTPUT):
            return
        replay, emitted, place = self._replay(record), self._trace.integers(number, "tokens"), Place(record, "finished")
        committed = replay.tokens[len(replay.prompt) :]
        end = end_of(grammar, committed)
        if end is not None and end + 1 < len(emitted):
            expected = f"{end + 1}: its last token ends the text"
            self._compare.report(place, _OUTPUT, "length of the output", expected, len(emitted))

    def _check_mask(self, number: int, place: Place, paths: list[list[int]], rows: str) -> None:
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
            expected = every[0] if grammar is None or text is None else allowed_tokens(grammar, text, self._size, self._backend)
            if (wrong := np.flatnonzero(expected != own)).size:
                token = int(wrong[0])
                meaning = f"token {token} ({word(token)!r})" if word(token) else f"token {token} (an end)"
                more = f", and {wrong.size - 1} more" if wrong.size > 1 else ""
                index = f"{meaning} {rows} {row}{more}" if len(paths) > 1 else f"{meaning} {rows}{more}"
                said = ("refused", "allowed") if own[token] else ("allowed", "refused")
                self._compare.report(place, _MASK, index, *said, "" if applied else "No mask was applied.")
                return
