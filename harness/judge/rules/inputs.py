"""What forwards consume: the target's prompt and nodes, the draft's rows and their positions, and hidden states."""

from collections.abc import Callable

import numpy as np

from eagletwin.harness.core.records import Record
from eagletwin.reference.tree import depths

from ..compare import Place
from ..context import Rules
from ..replay import RequestReplay
from ..trees import parents_of
from . import rule, stages
from .multi_layer_draft import Layers
from .trees import Trees


class Inputs(Rules):
    @rule("target.inputs", "3.6", weights="no")
    @stages("target.extend")
    def prompt(self, number: int, record: Record) -> None:
        """The target consumes the prompt's tokens at their positions, and writes the request's own slots."""
        replay, chunk, place = self._replay(record), self._context.chunk(number, record), Place(record, "target.extend")
        tokens, ids = replay.tokens[chunk.start : chunk.stop], self._trace.integers(number, "input_ids")
        self._compare.integers(place, "target.inputs", tokens, ids, "row", chunk.start)
        positions = self._trace.integers(number, "positions")
        self._compare.integers(place, "target.inputs", list(chunk), positions, "position of row", chunk.start)

    @rule("verify.inputs", "3.5", weights="no")
    @stages("draft", "target.verify")
    def nodes(self, number: int, record: Record) -> None:
        """The target verifies x[M] and the nodes of the tree, at M + their depths."""
        round = self._round(record)
        if record.stage == "draft":
            place, tokens = Place(record, "draft"), self._trace.integers(number, "tokens")
            lengths = [round.committed], [record.numbers["seq_len"]]
            self._compare.integers(place, "verify.inputs", *lengths, "seq_len of round", record.round)
            self._compare.integers(place, "verify.inputs", [round.bonus], tokens[:1], "node", 0)
            return
        place, nodes = Place(record, "target.verify"), [round.bonus, *round.drafted]
        self._compare.integers(place, "verify.inputs", nodes, self._trace.integers(number, "input_ids"), "node", 0)
        parents = parents_of(self._case, round)
        if parents is not None:
            positions = [round.committed + depth for depth in depths(parents)]
            actual = self._trace.integers(number, "positions")
            self._compare.integers(place, "verify.inputs", positions, actual, "position of node", 0)

    @rule("target.hidden", "2", weights="yes")
    @stages("target.extend", "target.verify")
    def hidden(self, number: int, record: Record) -> None:
        """For every committed row the target hands the draft its hidden state h[i], the one that the recipe declares."""
        # What it computes for rejected nodes is garbage.
        if record.stage == "target.extend":
            chunk = self._context.chunk(number, record)
            first, rows = chunk.start, [*range(len(chunk))]
        else:
            round = self._round(record)
            first, rows = round.committed, [node for node in round.path if 0 <= node <= len(round.drafted)]
        target = self._replay(record).target_rows
        if target is None or "hidden_out" not in record.tensors:  # the forward never returned
            return
        rows = rows[: len(target.hidden) - first]
        expected = target.hidden[first : first + len(rows)]
        hidden = self._trace.array(number, "hidden_out")[np.array(rows, np.int64)]
        self._compare.floats(self._place(record, output=True), "target.hidden", expected, hidden, lambda n: f"row {first + n}")

    @rule(
        "draft.input_ids",
        "3.1-3.3",
        weights="no",
        sentence=(
            "Row i of the draft consumes token x[i+1]: at a chunk's tail the next prompt token, in draft decode the token "
            "drafted one step before."
        ),
        also=("draft",),
        of_layers=(
            "3.7",
            "Row i of layer k consumes token x[i+1+k]: at a chunk's tail the prompt's; past what is known yet, the drafts so "
            "far.",
        ),
        of_plain=(
            "3.10",
            "Row i of the draft consumes token x[i]; draft decode begins with a step 0, which consumes the bonus token x[M], "
            "and step j consumes the token drafted one step before.",
        ),
    )
    @rule(
        "draft.positions",
        "3.1-3.3",
        weights="no",
        sentence="Row i of the draft stands at position i; draft decode step j stands at position M + j - 1.",
        of_plain=("3.10", "Row i of the draft stands at position i; draft decode step j stands at position M + j."),
    )
    @rule(
        "draft.hidden_in",
        "3.1-3.3",
        weights="yes",
        sentence=(
            "Row i of the draft consumes the target's hidden state h[i]; draft decode consumes the draft's own state of the "
            "row that proposed its token."
        ),
        also=("prefill", "extend"),
        of_layers=(
            "3.7",
            "Row i of every layer consumes the target's hidden state h[i]; in a chained model, the state of the layer below "
            "for the same row.",
        ),
    )
    @stages("draft.extend", "draft.extend_decode", "draft.decode")
    def draft(self, number: int, record: Record) -> None:
        if record.stage == "draft.decode":
            self._decode(number, record)
        elif self._model.mtp_layers:
            self._context.of(Layers).inputs(number, record)
        elif record.stage == "draft.extend":
            chunk, why = self._context.chunk(number, record), ""
            tail = chunk.stop - 1
            if not self._model.ahead:
                why = "The draft is a plain language model: its row i must consume x[i], and the first is that of x[0]."
            elif chunk.stop < len(self._replay(record).prompt):
                why = (
                    f"The chunk ends at {tail + 1} and is not the last: its tail row {tail} must consume the next prompt token."
                )
            self._rows(number, self._place(record), chunk, why)
        else:
            round = self._round(record)
            self._rows(number, self._place(record), range(round.committed, round.end))

    def _rows(self, number: int, place: Place, rows: range, why: str = "") -> None:
        """Of committed draft rows: row i consumes (x[i+1], h[i]) at position i; of a plain language model, x[i]."""
        replay, ahead = self._replay(place.record), self._model.ahead
        tokens, ids = replay.tokens[rows.start + ahead : rows.stop + ahead], self._trace.integers(number, "input_ids")
        ended = self._trace.header.ending.kind != "finished"
        known = slice(len(tokens) if ended and len(ids) == len(rows) else None)  # else the next token was never said
        self._compare.integers(place, "draft.input_ids", tokens, ids[known], "row", rows.start, why)
        positions = self._trace.integers(number, "positions")
        self._compare.integers(place, "draft.positions", list(rows), positions, "row", rows.start)
        if replay.target_rows is not None and self._model.states:
            expected, hidden = replay.target.hidden[rows.start : rows.stop], self._trace.array(number, "hidden_in")
            self._compare.floats(place, "draft.hidden_in", expected, hidden[known], lambda n: f"row {rows[n]}")

    def _decode(self, number: int, record: Record) -> None:
        step, replay, model, topk = record.step, self._replay(record), self._model, self._case.topk
        # else the run ended in draft(), and the trace does not say which candidates these were
        returned = record.round < len(replay.rounds)
        committed = self._round(record).committed if returned else len(replay.tokens) - 1
        place, position = Place(record, "draft", step), committed + (step if model.memory else 0) - model.ahead
        rows, first = ("row", position) if topk == 1 else (f"row {position}, branch", 0)
        ids = self._trace.integers(number, "input_ids") if returned else []
        if returned:
            round = self._round(record)
            tokens = self._context.of(Trees).consumed_tokens(round, step, ids) if step else [round.bonus] * topk
            self._compare.integers(place, "draft.input_ids", tokens, ids, rows, first)
        why = f"M = {committed} tokens are committed before the bonus token, and this is draft decode step {step}."
        if not model.memory:
            why += " It reads the target's rows, and stands with the last of them."
        positions = self._trace.integers(number, "positions")
        self._compare.integers(place, "draft.positions", [position] * topk, positions, rows, first, why)
        if returned and model.numbers and model.states:
            self._check_decode_step(number, place, replay, lambda branch: f"{rows} {first + branch}")
        if returned and model.memory and self._context.table(record) is None:
            # draft() never returned, perhaps because of what it consumed, which is compared there otherwise
            self._context.of(Trees).cut_off(record, replay, ids, position)

    def _check_decode_step(self, number: int, place: Place, replay: RequestReplay, name: Callable[[int], str]) -> None:
        """The states that a draft decode step consumed, and those that it handed on."""
        record = place.record
        growth, last = replay.growths[record.round], self._round(record).committed - 1
        if record.step:
            consumed, ran = growth.hidden[record.step - 1], growth.handed_on[record.step - 1]
        else:  # the bonus token's, on every branch alike
            consumed, ran = (
                np.repeat(rows.hidden[last : last + 1], self._case.topk, 0) for rows in (replay.target, replay.draft)
            )
        self._compare.floats(place, "draft.hidden_in", consumed, self._trace.array(number, "hidden_in"), name)
        if "hidden_out" in record.tensors:  # absent if the forward never returned
            out = Place(record, "draft", record.step, output=True)
            handed_on = self._trace.array(number, "hidden_out")

            def handed_on_name(branch: int) -> str:
                return f"state that {name(branch)} proposes from"

            self._compare.floats(out, "draft.proposal", ran, handed_on, handed_on_name)
