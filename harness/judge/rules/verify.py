"""What verify decides and commits, and the tokens that a request is sent: `verify.accept`, `commit.path`, `output.tokens`."""

from eagletwin.harness.core.records import Record
from eagletwin.reference.tree import walk_greedy

from ..compare import Place
from ..context import Rules
from ..trees import parents_of
from . import rule, stages
from .outputs import Answers
from .sampling import Samples


class Verification(Rules):
    @rule("verify.accept", "3.5", weights="in part", also=("extend",))
    @stages("verify")
    def accept(self, number: int, record: Record) -> None:
        """Verify goes from node to the child that equals the target's argmax, and commits the argmax after the last as bonus.
        Where a request samples, its coins say which child and which bonus, and tokens have the target's distribution."""
        replay, round = self._replay(record), self._round(record)
        rows, decided = range(round.committed, round.end), replay.tokens[round.committed + 1 : round.end + 1]
        if self._model.numbers:
            logits, judged = replay.chosen_by(round), len(replay.allowing(rows))
            for n, token in enumerate(() if self._case.sampling_of(record.request) is not None else decided):
                index = f"token committed after {'node' if self._case.topk == 1 else 'accepted node'} {n}"
                with self._compare.looking_away(n >= judged):
                    self._compare.choice(Place(record, "verify", n), "verify.accept", logits[n], token, index)
        with self._compare.looking_away(replay.allowing(rows) != rows):
            self._check_path(number, record, decided)

    def _check_path(self, number: int, record: Record, decided: list[int]) -> None:
        """The path through the nodes, and what is committed along it."""
        round, numbers, place = self._round(record), record.numbers, Place(record, "verify", len(decided))
        parents, tokens = parents_of(self._case, round), [round.bonus, *round.drafted]
        if parents is not None:
            argmax = [-1] * len(tokens)  # of nodes off the path, where it is not compared
            for node, token in zip(round.path, decided, strict=False):
                if 0 <= node < len(tokens):
                    argmax[node] = token
            path = walk_greedy(tokens, parents, argmax)
            reported = [numbers["accept_len"]]
            self._compare.integers(place, "verify.accept", [len(path)], reported, "accept length of round", record.round)
            self._compare.integers(place, "verify.accept", path, round.path, "accepted node", 0)
        # spec v1 cuts off where the request ends, and commits no more; the length of its output is judged when it has finished
        kept = min(numbers.get("kept", numbers["accept_len"]), numbers["accept_len"])
        lengths = [round.committed, round.committed + kept]
        reported = [numbers["seq_len"], numbers["new_seq_len"]]
        self._compare.integers(place, "verify.accept", lengths, reported, "seq_len before and after, entry", 0)
        # a chain's tokens are in front as they are; a tree's are moved there
        front, predicted = "verify.accept" if self._case.topk == 1 else "commit.path", self._trace.integers(number, "predicted")
        self._compare.integers(place, front, decided[:kept], predicted, "committed token", 0)

    @rule("commit.path", "3.6", weights="in part", also=("extend",))
    @stages("verify")
    def path(self, number: int, record: Record) -> None:
        """The accepted path is moved to the front: its KV rows in the target's pool, its predicted tokens, its hidden
        states."""
        if "path_hidden" not in record.tensors:
            return
        replay, round, hidden = self._replay(record), self._round(record), self._trace.array(number, "path_hidden")
        expected = replay.target.hidden[round.committed : round.committed + len(hidden)]
        place, rows = Place(record, "verify", len(self._trace.integers(number, "predicted"))), range(round.committed, round.end)
        with self._compare.looking_away(replay.allowing(rows) != rows):
            self._compare.floats(
                place,
                "commit.path",
                expected,
                hidden[: len(expected)],
                lambda n: f"state of accepted node {n}, moved to the front",
            )

    @stages("extend")
    def length(self, _number: int, record: Record) -> None:
        place, end = Place(record, "draft.extend_decode"), self._round(record).end
        self._compare.integers(place, "verify.accept", [end], [record.numbers["seq_len"]], "seq_len after round", record.round)

    @rule("output.tokens", "3.9", weights="in part", also=("finished",))
    @stages("prefill")
    def first(self, number: int, record: Record) -> None:
        """The emitted tokens equal plain greedy decoding of the target, up to the finished length."""
        replay, end = self._replay(record), record.numbers["end"]
        if not (record.numbers["final"] and self._has_output(record)):
            return
        token, index = self._trace.integers(number, "next_token")[0], f"output token {end - len(replay.prompt)}"
        place, logits = Place(record, "target.extend", output=True), replay.target.logits[end - 1]
        sampling = self._case.sampling_of(record.request)
        with self._compare.looking_away(replay.impossible == end - 1):
            if sampling is None:
                self._compare.choice(place, "output.tokens", logits, token, index)
            else:
                self._context.of(Samples).first_token(place, sampling, logits, token, index)

    @stages("finished")
    def check_emitted(self, number: int, record: Record) -> None:
        replay, emitted = self._replay(record), self._trace.integers(number, "tokens")
        request, committed = self._case.request(record.request), replay.tokens[len(replay.prompt) :]
        limit, place = request.max_new_tokens, Place(record, "finished")
        # a server's request also ends by a stop string, a grammar, or the end of the context: `otherwise`
        cut = record.numbers["aborted"] or record.numbers.get("otherwise")
        if cut:  # what it did emit must be right; an abort does not cut a round at max_new_tokens
            limit = min(len(emitted), len(committed))
        else:
            end = self._context.of(Answers).end(request, committed)
            limit = limit if end is None else min(limit, end + 1)
            if len(emitted) != limit:
                self._compare.integers(place, "output.tokens", [limit], [len(emitted)], "length of the output, request", 0)
        self._compare.integers(place, "output.tokens", committed[:limit], emitted, "output token", 0)
