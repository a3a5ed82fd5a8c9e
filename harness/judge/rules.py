"""The rules: each record of a trace against what the reference says it must be. One method a stage.

compare.py says how numbers are compared, story.py what they must be, slots.py who owns which slot.
"""

import torch
from torch import Tensor

from eagletwin.harness.models.recipes import RECIPES
from eagletwin.harness.models.weights import model_pair
from eagletwin.harness.trace import Record, Trace
from eagletwin.reference.verify import verify_inputs

from .compare import Compare, Findings, Phase, Place
from .events import Events
from .slots import Slots
from .story import Round, Story, stored_rows


class Rules:
    """Checks the records of one trace. `without`: rules that are switched off."""

    def __init__(self, trace: Trace, stories: dict[str, Story], without: frozenset[str]) -> None:
        self._trace = trace
        self._stories = stories
        self._case = trace.header.case
        self._compare = Compare([request.id for request in self._case.requests], without)
        self._slots = Slots(trace, self._compare)
        self._numbers = {record.key: n for n, record in enumerate(trace.header.records)}
        self._proposed: dict[str, int] = {}  # request -> the last record that proposed d[1]
        self._proposes: list[int] = model_pair(self._case.model).proposes.tolist()  # by the recipe, whatever the engine loaded

    def check(self) -> Findings:
        checks = {
            "target.extend": self._target_extend,
            "draft.extend": self._draft_extend,
            "prefill": self._prefill,
            "draft.decode": self._draft_decode,
            "draft": self._draft,
            "target.verify": self._target_verify,
            "verify": self._verify,
            "draft.extend_decode": self._draft_extend_decode,
            "extend": self._extend,
            "finished": self._finished,
            "cached": self._cached,
            "iteration": self._iteration,
            "batch": self._slots.batch,
            "flushed": self._flushed,
        }
        for number, record in enumerate(self._trace.header.records):
            checks[record.stage](number, record)
            if "proposal" in record.tensors:
                self._proposed[record.request] = number
        Events(self._trace, self._compare).check()
        return self._compare.settled()

    def _table(self, record: Record, boundary: str, step: int = 0, attempt: int = 0) -> list[int] | None:
        """req_to_token of the request at the boundary record that goes with an inner one; None if the run ended before it."""
        number = self._numbers.get((record.request, record.round, boundary, step, attempt))
        return None if number is None else self._trace.integers(number, "table")

    def _round(self, record: Record) -> Round:
        return self._stories[record.request].rounds[record.round]

    # -- prefill -------------------------------------------------------------------------------------------------------

    def _chunk(self, number: int, record: Record) -> range:
        """Positions of a prefill forward's chunk; by its own slots if the run ended before the chunk did."""
        boundary = self._numbers.get((record.request, record.round, "prefill", record.step, record.attempt))
        if boundary is None:
            return range(record.step, record.step + len(self._trace.tensor(number, "slots")))
        return range(record.step, self._trace.header.records[boundary].numbers["end"])

    def _target_extend(self, number: int, record: Record) -> None:
        story, chunk, place = self._stories[record.request], self._chunk(number, record), Place(record, "target.extend")
        tokens, ids = story.tokens[chunk.start : chunk.stop], self._trace.integers(number, "input_ids")
        self._compare.integers(place, "target.inputs", tokens, ids, "row", chunk.start)
        positions = self._trace.integers(number, "positions")
        self._compare.integers(place, "target.inputs", list(chunk), positions, "position of row", chunk.start)
        self._target_hidden(number, Place(record, "target.extend", output=True), chunk)
        table = self._table(record, "prefill", record.step, record.attempt)
        if table is not None:
            self._slots.written(number, place, table, chunk.start)

    def _target_hidden(self, number: int, place: Place, rows: range) -> None:
        """States that the target hands to the draft, for committed rows; what it computes for rejected nodes is garbage."""
        target = self._stories[place.record.request].target
        if target is None or "hidden_out" not in place.record.tensors:  # the forward never returned
            return
        rows = range(rows.start, min(rows.stop, target.hidden.shape[0]))
        hidden = self._trace.tensor(number, "hidden_out")[: len(rows)]
        self._compare.floats(place, "target.hidden", target.hidden[rows.start : rows.stop], hidden, lambda n: f"row {rows[n]}")

    def _draft_extend(self, number: int, record: Record) -> None:
        story, chunk, place = self._stories[record.request], self._chunk(number, record), Place(record, "draft.extend")
        why = ""
        if chunk.stop < len(story.prompt):
            tail = chunk.stop - 1
            why = f"The chunk ends at {chunk.stop} and is not the last: its tail row {tail} must consume the next prompt token."
        self._draft_rows(number, place, story, chunk, why)
        table = self._table(record, "prefill", record.step, record.attempt)
        if table is not None:
            self._slots.written(number, place, table, chunk.start)

    def _draft_rows(self, number: int, place: Place, story: Story, rows: range, why: str = "") -> None:
        """Inputs of committed draft rows: row i consumes (x[i+1], h[i]) at position i."""
        tokens, ids = story.tokens[rows.start + 1 : rows.stop + 1], self._trace.integers(number, "input_ids")
        self._compare.integers(place, "draft.input_ids", tokens, ids, "row", rows.start, why)
        self._compare.integers(
            place, "draft.positions", list(rows), self._trace.integers(number, "positions"), "row", rows.start
        )
        if story.target is not None:
            expected, hidden = story.target.hidden[rows.start : rows.stop], self._trace.tensor(number, "hidden_in")
            self._compare.floats(place, "draft.hidden_in", expected, hidden, lambda n: f"row {rows[n]}")

    def _prefill(self, number: int, record: Record) -> None:
        story, end = self._stories[record.request], record.numbers["end"]
        if story.target is None:
            return
        if record.numbers["final"]:
            token, index = self._trace.integers(number, "next_token")[0], f"output token {end - len(story.prompt)}"
            self._compare.choice(
                Place(record, "target.extend", output=True), "output.tokens", story.target.logits[end - 1], token, index
            )
        self._stored(number, record, "target.extend", "draft.extend")
        if record.numbers["final"]:
            self._next_proposal(number, Place(record, "draft.extend", output=True), end)

    def _stored(self, number: int, record: Record, target_phase: Phase, draft_phase: Phase) -> None:
        """KV rows that were written, or written over, since the last boundary."""
        story = self._stories[record.request]
        for part, place in (("target", Place(record, target_phase)), ("draft", Place(record, draft_phase))):
            self._stored_in(part, number, place, story.stored[part])

    def _stored_in(self, part: str, number: int, place: Place, reference: Tensor) -> None:
        at = self._trace.tensor(number, f"{part}_rows")
        stored = stored_rows(self._trace.tensor(number, f"{part}_keys"), self._trace.tensor(number, f"{part}_values"))
        if at.shape[0] != stored.shape[0]:
            raise ValueError(f"{len(at)} positions of {len(stored)} rows of the {part}")
        known = at < reference.shape[0]  # a row past everything that was committed has no reference
        if not known.all():
            if self._compare.on(f"{part}.kv"):
                expected = "no row: its token was never committed"
                self._compare.report(place, f"{part}.kv", f"row {int(at[~known][0])}", expected, "a row")
            at, stored = at[known], stored[known]
        self._compare.floats(place, f"{part}.kv", reference[at], stored, lambda n: f"row {int(at[n])}")

    def _next_proposal(self, number: int, place: Place, committed: int) -> None:
        """d[1] and the hidden state that goes with it, from the last committed row M-1."""
        rows = self._stories[place.record.request].draft
        assert rows is not None
        last = slice(committed - 1, committed)
        hidden = self._trace.tensor(number, "proposal_hidden")[None]
        index = f"state that row {committed - 1} hands to draft decode"
        self._compare.row(place, "draft.hidden_in", rows.hidden[last], hidden, index)
        self._compare.choice(place, "draft.proposal", rows.logits[committed - 1], self._proposal(number)[0], "d[1]")

    def _proposal(self, number: int) -> list[int]:
        """What a record proposes, in the target's vocabulary. The engine keeps ids of the draft's until it drafts on.

        An id outside the draft's vocabulary is moved past the target's, so that it is outside of that as well.
        """
        proposes, vocabulary = self._proposes, RECIPES[self._case.model].target.vocab_size
        ids = self._trace.integers(number, "proposal")
        return [proposes[n] if 0 <= n < len(proposes) else vocabulary + abs(n) for n in ids]

    # -- draft and verify ----------------------------------------------------------------------------------------------

    def _draft_decode(self, number: int, record: Record) -> None:
        round, step = self._round(record), record.step
        place, position = Place(record, "draft", step), round.committed + step - 1
        must, ids = round.drafted[step - 1 : step], self._trace.integers(number, "input_ids")
        self._compare.integers(place, "draft.input_ids", must, ids, "row", position)
        why = f"M = {round.committed} tokens are committed before the bonus token, and this is draft decode step {step}."
        positions = self._trace.integers(number, "positions")
        self._compare.integers(place, "draft.positions", [position], positions, "row", position, why)
        expected = self._stories[record.request].chains[record.round].hidden[step - 1 : step]
        hidden = self._trace.tensor(number, "hidden_in")
        self._compare.row(place, "draft.hidden_in", expected, hidden, f"row {position}")
        if "hidden_out" in record.tensors:  # absent if the forward never returned
            handed_on = self._stories[record.request].chains[record.round].handed_on[step - 1 : step]
            out, name = self._trace.tensor(number, "hidden_out"), f"state that d[{step + 1}] is chosen from"
            self._compare.row(Place(record, "draft", step, output=True), "draft.proposal", handed_on, out, name)
        table = self._table(record, "draft")
        if table is None:  # draft() never returned, perhaps because of what it consumed, which is compared there otherwise
            self._consumed(record, ids, position)
        else:
            # Slots come first: all of them are assigned before the first forward of draft(), and one that is written twice
            # shows in the row of an earlier step.
            self._slots.written(number, Place(record, "draft"), table, position)

    def _consumed(self, record: Record, ids: list[int], position: int) -> None:
        """The token of a draft decode step, by the proposal before it."""
        if record.step > 1:
            logits = self._stories[record.request].chains[record.round].logits[record.step - 1]
            place = Place(record, "draft", record.step - 1, output=True)
            self._compare.choice(place, "draft.proposal", logits, ids[0], f"d[{record.step}]")
        elif record.request in self._proposed:
            proposed, place = self._proposal(self._proposed[record.request]), Place(record, "draft", 1)
            self._compare.integers(place, "draft.input_ids", proposed, ids, "row", position)

    def _draft(self, number: int, record: Record) -> None:
        round, chain = self._round(record), self._stories[record.request].chains[record.round]
        place, committed = Place(record, "draft"), round.committed
        self._compare.integers(
            place, "verify.inputs", [committed], [record.numbers["seq_len"]], "seq_len of round", record.round
        )
        self._compare.integers(place, "verify.inputs", [round.bonus], self._trace.integers(number, "tokens")[:1], "node", 0)
        nodes = list(range(committed, committed + self._case.num_draft_tokens))
        self._compare.integers(place, "verify.inputs", nodes, self._trace.integers(number, "positions"), "position of node", 0)
        # d[1] came from the extend before and was judged there: what draft() hands on must be that very token
        if record.request in self._proposed:
            proposed = self._proposal(self._proposed[record.request])
            self._compare.integers(place, "draft.proposal", proposed, round.drafted[:1], "d[1], node", 1)
        stored = stored_rows(self._trace.tensor(number, "scratch_keys"), self._trace.tensor(number, "scratch_values"))
        expected = torch.stack([chain.keys, chain.values], 1)  # [S-1, 2, L, G, D]
        for step in range(1, self._case.num_steps):
            at, here = slice(step - 1, step), Place(record, "draft", step)
            index = f"row {committed + step - 1} of draft decode step {step}"
            self._compare.row(here, "draft.scratch_kv", expected[at], stored[at], index)
            chosen = Place(record, "draft", step, output=True)
            self._compare.choice(chosen, "draft.proposal", chain.logits[step], round.drafted[step], f"d[{step + 1}]")

    def _target_verify(self, number: int, record: Record) -> None:
        round, place = self._round(record), Place(record, "target.verify")
        nodes = verify_inputs(round.bonus, round.drafted)
        self._compare.integers(place, "verify.inputs", nodes, self._trace.integers(number, "input_ids"), "node", 0)
        positions = list(range(round.committed, round.committed + len(nodes)))
        self._compare.integers(
            place, "verify.inputs", positions, self._trace.integers(number, "positions"), "position of node", 0
        )
        self._target_hidden(number, Place(record, "target.verify", output=True), range(round.committed, round.end))
        table = self._table(record, "draft")
        if table is not None:
            self._slots.written(number, place, table, round.committed)

    def _verify(self, number: int, record: Record) -> None:
        story, round, numbers = self._stories[record.request], self._round(record), record.numbers
        assert story.target is not None
        predicted, place = self._trace.integers(number, "predicted"), Place(record, "verify")
        for node, token in enumerate(predicted):
            logits, index = story.target.logits[round.committed + node], f"token committed after node {node}"
            self._compare.choice(Place(record, "verify", node), "verify.accept", logits, token, index)
        # the walk of reference/verify.py, over the target's choices as adopted above
        accept_len = 1
        while (
            accept_len <= min(len(round.drafted), len(predicted)) and round.drafted[accept_len - 1] == predicted[accept_len - 1]
        ):
            accept_len += 1
        said = [numbers["accept_len"]]
        self._compare.integers(place, "verify.accept", [accept_len], said, "accept length of round", record.round)
        nodes, path = list(range(len(predicted))), self._trace.integers(number, "accept_index")
        self._compare.integers(place, "verify.accept", nodes, path, "accepted node", 0)
        self._compare.integers(place, "verify.accept", predicted[-1:], [numbers["bonus"]], "bonus token of round", record.round)
        lengths = [round.committed, round.committed + numbers["accept_len"]]
        said = [numbers["seq_len"], numbers["new_seq_len"]]
        self._compare.integers(place, "verify.accept", lengths, said, "seq_len before and after, entry", 0)

    def _draft_extend_decode(self, number: int, record: Record) -> None:
        round, place = self._round(record), Place(record, "draft.extend_decode")
        self._draft_rows(number, place, self._stories[record.request], range(round.committed, round.end))
        table = self._table(record, "draft")
        if table is not None:
            self._slots.written(number, place, table, round.committed)

    def _extend(self, number: int, record: Record) -> None:
        place, end = Place(record, "draft.extend_decode"), self._round(record).end
        self._compare.integers(place, "verify.accept", [end], [record.numbers["seq_len"]], "seq_len after round", record.round)
        self._stored(number, record, "target.verify", "draft.extend_decode")
        self._next_proposal(number, Place(record, "draft.extend_decode", output=True), self._round(record).end)

    # -- the end of a request, and the pool ------------------------------------------------------------------------------

    def _finished(self, number: int, record: Record) -> None:
        story, emitted = self._stories[record.request], self._trace.integers(number, "tokens")
        request = next(request for request in self._case.requests if request.id == record.request)
        limit = request.max_new_tokens
        committed, place = story.tokens[len(story.prompt) :], Place(record, "finished")
        if record.numbers["aborted"]:  # what it did emit must still be right; nobody cuts a last round at max_new_tokens
            limit = min(len(emitted), len(committed))
        elif request.stop:
            ends = {*request.stop, RECIPES[self._case.model].end_of_sequence}
            limit = next((n for n, token in enumerate(committed[:limit], 1) if token in ends), limit)
        expected = committed[:limit]
        if not record.numbers["aborted"] and len(emitted) != limit:
            self._compare.integers(place, "output.tokens", [limit], [len(emitted)], "length of the output, request", 0)
        self._compare.integers(place, "output.tokens", expected, emitted, "output token", 0)

    def _cached(self, number: int, record: Record) -> None:
        """Rows that the prefix cache keeps must be what a request that reuses them would have computed."""
        story, place = self._stories[record.request], Place(record, "finished")
        count, tokens = len(self._trace.tensor(number, "slots")), self._trace.integers(number, "tokens")
        self._compare.integers(place, "draft.kv", story.tokens[: len(tokens)], tokens, "token of the cached path", 0)
        for part, reference in story.stored.items():
            stored = stored_rows(self._trace.tensor(number, f"{part}_keys"), self._trace.tensor(number, f"{part}_values"))
            known = min(count, len(reference))
            if known < count and self._compare.on(f"{part}.kv"):
                expected = "no row: its token was never committed"
                self._compare.report(place, f"{part}.kv", f"cached row {known}", expected, "a row")
            self._compare.floats(place, f"{part}.kv", reference[:known], stored[:known], lambda n: f"cached row {n}")

    def _iteration(self, number: int, record: Record) -> None:
        self._slots.account(number, Place(record, "iteration"))

    def _flushed(self, number: int, record: Record) -> None:
        self._slots.account(number, Place(record, "finished"))
