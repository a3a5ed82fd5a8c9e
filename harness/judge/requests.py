"""The requests of a trace: each record against what the reference says it must be. One method a stage.

compare.py says how numbers are compared, replay.py what they must be, slots.py who owns which slot.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.records import Key, Record
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.core.verdict import View
from eagletwin.reference.layout import draft_columns, verify_columns
from eagletwin.reference.tree import depths, walk_greedy

from .adaptive import Steps
from .bounds import FLOAT32, bounds_of
from .compare import Compare, Findings, Phase, Place
from .completeness import draft_decode_in_graph, layers_in_graph
from .events import Aborts, Events, GivenUp
from .grammars import Grammars, impossible
from .model import model_of
from .multi_layer_draft import Layers
from .outputs import Answers
from .plain_decode import PlainDecode
from .prefix_cache import CacheRows, Hits, KeptRows
from .replay import RequestReplay, Round, recorded_rows
from .sampling import Samples
from .sessions import Sessions
from .slots import Slots, Windows
from .states import States, TrackedStates
from .trees import Trees, parents_of


class RequestJudge:
    """Checks the records of one trace. `without`: rules that are switched off; view: that of the replays."""

    def __init__(self, trace: Trace, replays: dict[str, RequestReplay], without: frozenset[str], view: View) -> None:
        self._trace = trace
        self._stories = replays
        self._case = trace.header.case
        self._model = model_of(trace.header, view)
        # of a recording no float is compared
        bounds = bounds_of(trace.header.engine.dtype, self._case.model) if self._model.numbers else FLOAT32
        self._compare = Compare(
            [request.id for request in self._case.requests], without, bounds, self._model.latent, windows=self._model.windows
        )
        self._sessions = Sessions(trace, replays, self._compare, self._model)
        self._slots = Slots(trace, self._compare, self._sessions)
        self._windows = Windows(trace, self._compare)
        self._states = States(trace, self._compare)
        self._cache_rows = CacheRows(trace, replays, self._model)
        self._tracked = TrackedStates(trace, replays, self._compare, self._model, bounds)
        self._hits = Hits(trace, replays, self._compare, self._model, self._cache_rows, self._tracked, self._sessions)
        self._kept = KeptRows(trace, replays, self._compare, self._model, self._cache_rows, self._sessions)
        self._trees = Trees(trace, self._compare, self._model)
        self._samples = Samples(trace, self._compare, bounds)
        self._numbers = {record.key: n for n, record in enumerate(trace.header.records)}
        self._begins: set[str] = set()  # requests that were prefilled, and have had no round since
        self._emitted: dict[str, int] = {}  # request -> how many tokens were emitted for it
        self._answers = Answers(trace, replays, self._compare, self._model)
        self._grammars = Grammars(trace, self._compare, self._model)
        self._steps = Steps(trace, self._compare)
        self._aborts = Aborts(trace, self._compare)
        self._given_up = GivenUp(trace, self._compare, self._model)
        self._plain = PlainDecode(trace, replays, self._compare, bounds)
        self._impossible = impossible(trace, replays)
        for name, one in self._impossible.items():
            self._compare.asks_the_impossible(name, one.token)
        self._layers = None
        if self._model.mtp_layers:
            stored = view if view == "committed" else "last_fed"
            self._layers = Layers(trace, replays, self._compare, stored, self._chunk)

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
            "batch": self._batch,
            "flushed": self._flushed,
            "copy": self._copied,
            "looked_up": self._kept.looked_up,
            "read": self._kept.read,
            "session": self._sessions.changed,
            "pool": self._slots.counted,
            "steps": self._steps.round,
            "fed": self._steps.fed,
            "abort": self._aborts.came,
            "plain": self._plain.said,
        }
        for number, record in enumerate(self._trace.header.records):
            behind = record.request in self._impossible and number > self._impossible[record.request].number
            with self._compare.looking_at(record, self._committed(number, record), away=behind):
                checks[record.stage](number, record)
        Events(self._trace, self._compare).check()
        return self._compare.settled()

    def _committed(self, number: int, record: Record) -> int:
        """How many rows of a request a record committed."""
        if record.stage == "target.extend":
            return len(self._chunk(number, record))
        return self._round(record).end - self._round(record).committed if record.stage == "extend" else 0

    def _table(self, record: Record, boundary: str, step: int = 0, attempt: int = 0) -> list[int] | None:
        """req_to_token of the request at the boundary record that goes with an inner one; None if the run ended before it."""
        number = self._numbers.get(Key(record.request, record.round, boundary, step, attempt=attempt))
        return None if number is None else self._trace.integers(number, "table")

    def _round(self, record: Record) -> Round:
        return self._stories[record.request].rounds[record.round]

    # -- prefill -------------------------------------------------------------------------------------------------------

    def _chunk(self, number: int, record: Record) -> range:
        """Positions of a prefill forward's chunk; by its own slots if the run ended before the chunk did."""
        boundary = self._numbers.get(Key(record.request, record.round, "prefill", record.step, attempt=record.attempt))
        if boundary is None:
            return range(record.step, record.step + len(self._trace.array(number, "slots")))
        return range(record.step, self._trace.header.records[boundary].numbers["end"])

    def _target_extend(self, number: int, record: Record) -> None:
        replay, chunk, place = self._stories[record.request], self._chunk(number, record), Place(record, "target.extend")
        self._windows.prefill(Place(record, "target.extend", step=-1), chunk)
        tokens, ids = replay.tokens[chunk.start : chunk.stop], self._trace.integers(number, "input_ids")
        self._compare.integers(place, "target.inputs", tokens, ids, "row", chunk.start)
        positions = self._trace.integers(number, "positions")
        self._compare.integers(place, "target.inputs", list(chunk), positions, "position of row", chunk.start)
        self._target_hidden(number, Place(record, "target.extend", output=True), chunk.start, range(len(chunk)))
        table = self._table(record, "prefill", record.step, record.attempt)
        if table is not None:
            self._slots.written(number, place, table, chunk)

    def _target_hidden(self, number: int, place: Place, first: int, rows: Sequence[int]) -> None:
        """States that the target hands to the draft: rows of the forward for the committed positions first, first + 1, ..

        What it computes for rejected nodes is garbage.
        """
        target = self._stories[place.record.request].target_rows
        if target is None or "hidden_out" not in place.record.tensors:  # the forward never returned
            return
        rows = rows[: len(target.hidden) - first]
        expected = target.hidden[first : first + len(rows)]
        hidden = self._trace.array(number, "hidden_out")[np.array(rows, np.int64)]
        self._compare.floats(place, "target.hidden", expected, hidden, lambda n: f"row {first + n}")

    def _draft_extend(self, number: int, record: Record) -> None:
        replay, chunk, place = self._stories[record.request], self._chunk(number, record), Place(record, "draft.extend")
        if self._layers is not None:
            place = self._layers.forward(number, record, "draft.extend", "prefill", record.step, None)
        else:
            why, tail = "", chunk.stop - 1
            if not self._model.ahead:
                why = "The draft is a plain language model: its row i must consume x[i], and the first is that of x[0]."
            elif chunk.stop < len(replay.prompt):
                why = (
                    f"The chunk ends at {tail + 1} and is not the last: its tail row {tail} must consume the next prompt token."
                )
            self._draft_rows(number, place, replay, chunk, why)
        table = self._table(record, "prefill", record.step, record.attempt)
        if table is not None:
            self._slots.written(number, place, table, chunk)

    def _draft_rows(self, number: int, place: Place, replay: RequestReplay, rows: range, why: str = "") -> None:
        """Inputs of committed draft rows: row i consumes (x[i+1], h[i]) at position i; of a plain language model, x[i]."""
        ahead, ids = self._model.ahead, self._trace.integers(number, "input_ids")
        tokens = replay.tokens[rows.start + ahead : rows.stop + ahead]
        self._compare.integers(place, "draft.input_ids", tokens, ids, "row", rows.start, why)
        self._compare.integers(
            place, "draft.positions", list(rows), self._trace.integers(number, "positions"), "row", rows.start
        )
        if replay.target_rows is not None and self._model.states:
            expected, hidden = replay.target.hidden[rows.start : rows.stop], self._trace.array(number, "hidden_in")
            self._compare.floats(place, "draft.hidden_in", expected, hidden, lambda n: f"row {rows[n]}")

    def _prefill(self, number: int, record: Record) -> None:
        replay, end = self._stories[record.request], record.numbers["end"]
        self._begins.add(record.request)
        self._hits.prefill(number, record)
        self._sessions.prefill(record)
        self._kept.prefill(number, record)
        self._cache_rows.committed(number, record)
        self._slots.keep(record, self._trace.integers(number, "table"))
        if not self._model.numbers:
            self._handed_on(number, record, "draft.extend")
            return
        if replay.target_rows is None:  # of one token, none follows
            return
        if not replay.goes_on_behind(end - 1):  # which the rules of what it is given have seen
            return
        if record.numbers["final"]:
            token, index = self._trace.integers(number, "next_token")[0], f"output token {end - len(replay.prompt)}"
            place, logits = Place(record, "target.extend", output=True), replay.target.logits[end - 1]
            self._grammars.prefill(number, place, replay)
            sampling = self._case.sampled(record.request)
            with self._compare.looking_away(replay.impossible == end - 1):
                if sampling is None:
                    self._compare.choice(place, "output.tokens", logits, token, index)
                else:
                    self._samples.first_token(place, sampling, logits, token, index)
        self._states.committed(number, record, "target.extend", replay, end - 1)
        self._tracked.prefill(record)
        self._stored(number, record, "target.extend", "draft.extend")
        if record.numbers["final"] and self._layers is None:
            self._next_proposal(number, Place(record, "draft.extend", output=True), end)

    def _handed_on(self, number: int, record: Record, phase: Phase) -> None:
        """What an extend proposes, where no more than its tokens is known."""
        if self._layers is not None:
            self._layers.extended(number, record, phase)
        elif self._model.ahead and (record.stage == "extend" or record.numbers["final"]):
            self._trees.proposed(number, record.request)

    def _stored(self, number: int, record: Record, target_phase: Phase, draft_phase: Phase) -> None:
        """KV rows that were written, or written over, since the last boundary."""
        replay = self._stories[record.request]
        self._stored_in("target", number, Place(record, target_phase), replay.stored["target"])
        if self._layers is not None:
            self._layers.extended(number, record, draft_phase)
        elif self._model.memory:
            self._stored_in("draft", number, Place(record, draft_phase), replay.stored["draft"])

    def _stored_in(self, part: str, number: int, place: Place, reference: Array) -> None:
        at = self._trace.array(number, f"{part}_rows")
        stored = recorded_rows(self._trace, number, part)
        if len(at) != len(stored) or (at < 0).any():
            raise ValueError(f"{len(at)} positions of {len(stored)} rows of the {part}, the smallest {at.min(initial=0)}")
        known = at < len(reference)  # a row past everything that was committed has no reference
        if not known.all():
            if self._compare.on(f"{part}.kv"):
                expected = "no row: its token was never committed"
                self._compare.report(place, f"{part}.kv", f"row {int(at[~known][0])}", expected, "a row")
            at, stored = at[known], stored[known]
        if part == "target" and place.record.stage == "extend" and self._case.topk > 1:
            moved = at >= self._round(place.record).committed  # rows of the accepted path, wherever verify wrote them
            self._rows(place, "commit.path", reference, at[moved], stored[moved])
            at, stored = at[~moved], stored[~moved]
        self._rows(place, f"{part}.kv", reference, at, stored)

    def _rows(self, place: Place, rule: str, reference: Array, at: Array, stored: Array) -> None:
        self._compare.stored(place, rule, reference[at], stored, lambda n: f"row {int(at[n])}")

    def _next_proposal(self, number: int, place: Place, committed: int) -> None:
        """What the last committed row M-1 proposes, and the hidden state that goes with it.

        A plain language model proposes from row M, which draft decode begins with: what an extend proposes must not be used.
        A draft without a memory begins with it, too."""
        if not self._model.first_step:
            return
        rows = self._stories[place.record.request].draft
        if self._model.states:
            hidden = self._trace.array(number, "proposal_hidden")[None]
            index = f"state that row {committed - 1} hands to draft decode"
            self._compare.row(place, "draft.hidden_in", rows.hidden[committed - 1 : committed], hidden, index)
        self._trees.root(number, place, rows, committed - 1)

    # -- draft and verify ----------------------------------------------------------------------------------------------

    def _draft_decode(self, number: int, record: Record) -> None:
        step, replay = record.step, self._stories[record.request]
        # else the run ended in draft(), and the trace does not say which candidates these were
        returned = record.round < len(replay.rounds)
        committed = self._round(record).committed if returned else len(replay.tokens) - 1
        model, topk = self._model, self._case.topk
        ahead = model.ahead
        place, position = Place(record, "draft", step), committed + (step if model.memory else 0) - ahead
        rows, first = ("row", position) if topk == 1 else (f"row {position}, branch", 0)
        if returned:
            ids = self._trace.integers(number, "input_ids")
            round = self._round(record)
            tokens = self._trees.consumed(round, step, ids) if step else [round.bonus] * topk
            self._compare.integers(place, "draft.input_ids", tokens, ids, rows, first)
        why = f"M = {committed} tokens are committed before the bonus token, and this is draft decode step {step}."
        if not model.memory:
            why += " It reads the target's rows, and stands with the last of them."
        positions = self._trace.integers(number, "positions")
        self._compare.integers(place, "draft.positions", [position] * topk, positions, rows, first, why)
        if not returned:
            return
        round = self._round(record)
        if model.numbers and model.states:
            self._decoded(number, place, replay, lambda branch: f"{rows} {first + branch}")
        if not model.memory:
            return
        table = self._table(record, "draft")
        if table is None:  # draft() never returned, perhaps because of what it consumed, which is compared there otherwise
            self._trees.cut_off(record, replay, ids, position)
        else:
            # Slots come first: all of them are assigned before the first forward of draft(), and a slot that is written
            # twice shows in the row of an earlier step.
            columns = _columns(round.committed, self._case.topk, round.steps, self._case.page_size)
            self._slots.written(number, Place(record, "draft"), table, [branch[step - ahead] for branch in columns])

    def _decoded(self, number: int, place: Place, replay: RequestReplay, name: Callable[[int], str]) -> None:
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

            def handed(branch: int) -> str:
                return f"state that {name(branch)} proposes from"

            self._compare.floats(out, "draft.proposal", ran, handed_on, handed)

    def _draft(self, number: int, record: Record) -> None:
        round, replay = self._round(record), self._stories[record.request]
        place, committed = Place(record, "draft"), round.committed
        self._compare.integers(
            place, "verify.inputs", [committed], [record.numbers["seq_len"]], "seq_len of round", record.round
        )
        self._compare.integers(place, "verify.inputs", [round.bonus], self._trace.integers(number, "tokens")[:1], "node", 0)
        self._windows.round(Place(record, "draft", step=-1), committed, committed + round.nodes)
        self._slots.kept(place, self._trace.integers(number, "table"))
        begins = record.request in self._begins
        self._begins.discard(record.request)
        if record.numbers.get("undrafted"):
            self._undrafted(number, record, round, begins=begins)
            return
        if self._model.memory:
            self._scratch_slots(number, place, round)
        if self._layers is not None:
            self._layers.drafted(place, round)
            self._trees.shape(number, record, round)
            return
        if record.numbers.get("in_graph"):
            draft_decode_in_graph(self._trace, self._compare, self._trees, number, round)
        if not self._model.numbers:
            self._trees.grown_by_tokens(record, round)
            self._trees.shape(number, record, round)
            return
        if self._model.memory:
            self._scratch_rows(number, replay, round)
        self._trees.grown(number, record, replay, round)

    def _undrafted(self, number: int, record: Record, round: Round, *, begins: bool) -> None:
        """A tree that nobody drafted: a pipeline's last stage drafts when a round is over, and so for none that begins."""
        place = Place(record, "draft")
        if not (begins and self._trace.header.engine.pp > 1) and self._compare.on("draft.proposal"):
            self._compare.report(place, "draft.proposal", "the tree", "drafted when the round before was over", "never drafted")
        counted = list(range(len(round.drafted)))  # with the fix of pipeline-zeros
        nodes = counted if round.drafted == counted else [0] * len(counted)
        self._compare.integers(place, "verify.inputs", nodes, round.drafted, "node", 1)
        self._trees.shape(number, record, round)

    def _scratch_rows(self, number: int, replay: RequestReplay, round: Round) -> None:
        """What draft decode left in the slots that it borrowed."""
        record = self._trace.header.records[number]
        committed, growth = round.committed, replay.growths[record.round]
        if "hole_kv" in record.tensors:
            self._holes(number, Place(record, "draft"), replay, round)
        stored = recorded_rows(self._trace, number, "scratch")
        topk, ahead = self._case.topk, self._model.ahead
        for step in range(ahead, round.steps):
            at = stored[(step - ahead) * topk : (step - ahead + 1) * topk]

            def name(branch: int, step: int = step) -> str:
                of = f"branch {branch}, " if topk > 1 else ""
                return f"{of}row {committed + step - ahead} of draft decode step {step}"

            # of a plain language model step 0 runs the bonus token, on every branch alike
            expected = (
                growth.scratch[step - 1] if step else np.repeat(replay.stored["draft"][committed : committed + 1], topk, 0)
            )
            self._compare.stored(Place(record, "draft", step), "draft.scratch_kv", expected[: len(at)], at, name)

    def _scratch_slots(self, number: int, place: Place, round: Round) -> None:
        """Slots of draft decode, by branch and step, as they are laid out before the first forward."""
        table, case = self._trace.integers(number, "table"), self._case
        columns = _columns(round.committed, case.topk, round.steps, case.page_size)
        expected = [table[column] if column < len(table) else -1 for branch in columns for column in branch]
        slots = self._trace.integers(number, "scratch_slots")
        self._compare.integers(place, "draft.slots", expected, slots, "slot, by branch and step,", 0)

    def _holes(self, number: int, place: Place, replay: RequestReplay, round: Round) -> None:
        """What begins a branch's first page is a copy of the committed rows of the page that the prefix ends in."""
        holes = recorded_rows(self._trace, number, "hole")
        inside = round.committed % self._case.page_size
        begun = replay.stored["draft"][round.committed - inside : round.committed]
        expected: Array = np.tile(begun, (self._case.topk - 1, 1, 1, 1, 1))

        def name(hole: int) -> str:
            return f"copy of row {round.committed - inside + hole % inside} for branch {1 + hole // inside}"

        self._compare.stored(place, "draft.scratch_kv", expected, holes, name)

    def _target_verify(self, number: int, record: Record) -> None:
        round, place = self._round(record), Place(record, "target.verify")
        nodes = [round.bonus, *round.drafted]
        self._compare.integers(place, "verify.inputs", nodes, self._trace.integers(number, "input_ids"), "node", 0)
        parents = parents_of(self._case, round)
        if parents is not None:
            positions = [round.committed + depth for depth in depths(parents)]
            self._compare.integers(
                place, "verify.inputs", positions, self._trace.integers(number, "positions"), "position of node", 0
            )
        path = [node for node in round.path if 0 <= node < len(nodes)]
        self._target_hidden(number, Place(record, "target.verify", output=True), round.committed, path)
        table = self._own_table(number, record)
        if table is not None:
            self._slots.written(number, place, table, self._nodes(round))

    def _own_table(self, number: int, record: Record) -> list[int] | None:
        """The row of req_to_token that a forward of verify or draft extend found: the one row of the round, unless the record
        brings its own."""
        if "table" in record.tensors:
            return self._trace.integers(number, "table")
        return self._table(record, "draft")

    def _nodes(self, round: Round) -> list[int]:
        return _block(round.committed, round.nodes)

    def _verify(self, number: int, record: Record) -> None:
        replay, round = self._stories[record.request], self._round(record)
        decided = replay.tokens[round.committed + 1 : round.end + 1]
        parents, tokens = parents_of(self._case, round), [round.bonus, *round.drafted]
        if self._model.numbers:
            self._grammars.verify(number, Place(record, "verify"), replay, round, parents)
            self._decided(number, record, decided)
        rows = range(round.committed, round.end)
        with self._compare.looking_away(replay.allowing(rows) != rows):
            self._walked(number, record, decided, parents, tokens)

    def _walked(
        self, number: int, record: Record, decided: list[int], parents: Sequence[int] | None, tokens: list[int]
    ) -> None:
        """The path through the nodes, whose parents and tokens these are, and what is committed along it."""
        replay, round, numbers = self._stories[record.request], self._round(record), record.numbers
        place = Place(record, "verify", len(decided))
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
        if "path_hidden" in record.tensors:
            hidden = self._trace.array(number, "path_hidden")
            expected = replay.target.hidden[round.committed : round.committed + len(hidden)]
            moved = Place(record, "verify", len(predicted))
            self._compare.floats(
                moved,
                "commit.path",
                expected,
                hidden[: len(expected)],
                lambda n: f"state of accepted node {n}, moved to the front",
            )

    def _decided(self, number: int, record: Record, decided: list[int]) -> None:
        """What verify committed: the target's argmax after each accepted node, or what the coins decided."""
        replay, round = self._stories[record.request], self._round(record)
        logits = replay.chosen_by(round)
        judged = len(replay.allowing(range(round.committed, round.end)))
        for n, token in enumerate(decided):
            sent = replay.tokens[len(replay.prompt) : round.committed + 1 + n]
            with self._compare.looking_away(n >= judged):
                self._grammars.given(Place(record, "verify", n), sent, token, f"token committed after accepted node {n}")
        by_coins = False
        if self._case.samples:
            layers = self._layers
            proposed_from = replay.growths[record.round].logits if layers is None else layers.proposed_from(record.request)
            by_coins = self._samples.verified(number, record, replay, round, parents_of(self._case, round), proposed_from)
        for n, token in enumerate(() if by_coins else decided):
            index = f"token committed after node {n}" if self._case.topk == 1 else f"token committed after accepted node {n}"
            with self._compare.looking_away(n >= judged):
                self._compare.choice(Place(record, "verify", n), "verify.accept", logits[n], token, index)

    def _draft_extend_decode(self, number: int, record: Record) -> None:
        round, place = self._round(record), Place(record, "draft.extend_decode")
        if self._layers is not None:
            place = self._layers.forward(number, record, "draft.extend_decode", "extend", 0, round)
        else:
            self._draft_rows(number, place, self._stories[record.request], range(round.committed, round.end))
        table = self._own_table(number, record)
        if table is not None:
            packed = range(round.committed, round.end)  # spec v1 runs the accepted rows only
            self._slots.written(number, place, table, packed if "table" in record.tensors else self._nodes(round))

    def _extend(self, number: int, record: Record) -> None:
        place, end = Place(record, "draft.extend_decode"), self._round(record).end
        self._compare.integers(place, "verify.accept", [end], [record.numbers["seq_len"]], "seq_len after round", record.round)
        self._kept.round(record)
        self._cache_rows.committed(number, record)
        self._slots.keep(record, self._trace.integers(number, "table"))
        if self._model.numbers:
            self._states.committed(number, record, "verify", self._stories[record.request], end - 1)
            self._tracked.round(record, self._round(record).committed, end)
            self._stored(number, record, "target.verify", "draft.extend_decode")
        else:
            self._handed_on(number, record, "draft.extend_decode")
        if self._layers is None and self._model.numbers:
            self._next_proposal(number, Place(record, "draft.extend_decode", output=True), self._round(record).end)
        elif self._layers is not None and record.numbers.get("in_graph"):
            layers_in_graph(self._trace, self._compare)

    # -- the end of a request, and the pool ------------------------------------------------------------------------------

    def _finished(self, number: int, record: Record) -> None:
        replay, emitted = self._stories[record.request], self._trace.integers(number, "tokens")
        self._emitted[record.request] = len(emitted)
        request = self._case.request(record.request)
        limit = request.max_new_tokens
        committed, place = replay.tokens[len(replay.prompt) :], Place(record, "finished")
        # a server's request also ends by a stop string, a grammar, or the end of the context: `otherwise`
        cut = record.numbers["aborted"] or record.numbers.get("otherwise")
        if cut:  # what it did emit must be right; an abort does not cut a round at max_new_tokens
            limit = min(len(emitted), len(committed))
        else:
            end = self._answers.end(request, committed)
            limit = limit if end is None else min(limit, end + 1)
            self._grammars.ended(place, committed, emitted)
        expected = committed[:limit]
        if not cut and len(emitted) != limit:
            self._compare.integers(place, "output.tokens", [limit], [len(emitted)], "length of the output, request", 0)
        self._compare.integers(place, "output.tokens", expected, emitted, "output token", 0)
        self._given_up.finished(record, record.request in self._impossible)
        self._answers.finished(number, record)
        self._sessions.ended(number, record)
        self._kept.finished(number, record)
        self._tracked.finished(record, len(emitted))

    def _cached(self, number: int, record: Record) -> None:
        """Rows that the prefix cache keeps must be what a request that reuses them would have computed."""
        replay, place = self._stories[record.request], Place(record, "finished")
        count, tokens = len(self._trace.array(number, "slots")), self._trace.integers(number, "tokens")
        # what was emitted is in it; what a last round committed past the end may be
        least = len(replay.prompt) + self._emitted.get(record.request, 0)
        path = replay.tokens[: max(least, len(tokens))]
        self._compare.integers(place, "draft.kv", path, tokens, "token of the cached path", 0)
        self._states.cached(number, place, replay)
        for part, reference in replay.stored.items():
            stored = recorded_rows(self._trace, number, part)
            known = min(count, len(reference))
            # Keys of single tokens end with the last token, whose row of the target another request may have computed: it is
            # compared there. EAGLE's keys, pairs, end one before it.
            others = part == "target" and not self._model.states and count == len(replay.tokens)
            if known < count and not others and self._compare.on(f"{part}.kv"):
                expected = "no row: its token was never committed"
                self._compare.report(place, f"{part}.kv", f"cached row {known}", expected, "a row")
            self._compare.stored(place, f"{part}.kv", reference[:known], stored[:known], lambda n: f"cached row {n}")
        if replay.earlier is not None:
            self._cached_in_earlier_stages(record, replay.earlier)
        if self._layers is not None:
            self._layers.cached(number, record)

    def _cached_in_earlier_stages(self, record: Record, reference: Array) -> None:
        """The same of a pipeline's earlier stages: what they keep there, nothing that the last one computed need have read."""
        for rank, earlier in enumerate(self._trace.earlier, 1):
            at = next((n for n, one in enumerate(earlier.header.records) if one.key == record.key), None)
            if at is None:  # which `ranks.agree` says
                continue
            stored, first = recorded_rows(earlier, at, "target"), earlier.header.engine.first_layer
            known = min(len(stored), len(reference))

            def name(n: int, rank: int = rank) -> str:
                return f"cached row {n} of rank {rank}"

            expected = reference[:known, :, first : first + stored.shape[2]]
            self._compare.stored(Place(record, "finished"), "target.kv", expected, stored[:known], name)

    def _batch(self, number: int, record: Record) -> None:
        self._slots.batch(number, record)
        self._windows.batch(number, record)
        self._states.batch(number, record)
        self._hits.batch(number, record)
        self._kept.batch(number)

    def _copied(self, number: int, record: Record) -> None:
        self._hits.copied(self._cache_rows.copied(number, record), bool(record.numbers["restore"]))

    def _iteration(self, number: int, record: Record) -> None:
        self._slots.account(number, Place(record, "iteration"))
        self._states.account(number, Place(record, "iteration"))
        self._kept.iteration(number)
        self._tracked.look(number, record)

    def _flushed(self, number: int, record: Record) -> None:
        self._slots.account(number, Place(record, "finished"))
        self._states.account(number, Place(record, "finished"))
        self._steps.flushed(record)


@lru_cache(maxsize=256)  # asked for in every step of a round
def _columns(committed: int, topk: int, num_steps: int, page_size: int) -> list[list[int]]:
    """Columns of draft decode, by branch and step."""
    columns: list[list[int]] = draft_columns(committed, topk, num_steps, page_size).T.tolist()
    return columns


@lru_cache(maxsize=256)  # verify and draft extend write the same
def _block(committed: int, num_draft_tokens: int) -> list[int]:
    """Columns of the nodes."""
    columns: list[int] = verify_columns(committed, num_draft_tokens).tolist()
    return columns
