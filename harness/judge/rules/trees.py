"""The draft tree of a round: `draft.proposal` and `tree.*`. A chain is the tree of topk = 1.

What the engine chose is followed (replay.py), so each choice is judged as if all before it had been right.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.records import Record
from eagletwin.reference.sizes import count_candidates
from eagletwin.reference.tree import ancestor_mask, depths, retrieve_links

from ..bounds import SMALLEST_LOG, log_scale, logs
from ..compare import UNSEEN, Place
from ..completeness import INPUTS, draft_decode_in_graph
from ..context import Rules
from ..replay import ReferenceRows, RequestReplay, Round
from ..trees import parents_of
from . import rule, stages
from .multi_layer_draft import Layers
from .selection import Selection


@dataclass(frozen=True, slots=True)
class _Shape:
    """What follows from a tree's parents alone, each [D]: see reference/tree.py."""

    depths: list[int]
    mask: list[list[bool]]
    first: list[int]
    sibling: list[int]


@lru_cache(maxsize=256)
def _shape(parents: tuple[int, ...]) -> _Shape:
    return _Shape(depths(parents), ancestor_mask(parents).tolist(), *retrieve_links(parents))


class Trees(Rules):
    def begin(self) -> None:
        self._proposed: dict[str, list[int]] = {}  # request -> what the root row of its next round proposed
        self._begins: set[str] = set()  # requests that were prefilled, and have had no round since

    @rule("draft.proposal", "3.3", weights="in part", also=("draft", "draft.decode", "verify"))
    @stages("prefill", "extend")
    def check_extend(self, number: int, record: Record) -> None:
        """Each row proposes the topk tokens of its largest logits, best first."""
        # What the last committed row M-1 proposes, and the hidden state that goes with it. A plain language model proposes from
        # row M, which draft decode begins with: what an extend proposes must not be used. A draft without a memory begins with
        # it, too.
        prefill, model = record.stage == "prefill", self._model
        if prefill:
            self._begins.add(record.request)
        last = not prefill or bool(record.numbers["final"])
        if model.mtp_layers:
            if not prefill and record.numbers.get("in_graph"):
                self._compare.not_seen(("draft.runner", *INPUTS), self._case.num_steps)
        elif not model.numbers:
            if model.ahead and last:
                self.note_proposal(number, record.request)
        elif last and self._engine.skips and record.numbers.get("skipped"):
            self._proposed[record.request] = []
        elif last and model.first_step and (not prefill or self._has_output(record)):
            place = self._place(record, output=True)
            row = (record.numbers["end"] if prefill else self._round(record).end) - 1
            rows = self._replay(record).draft
            if model.states:
                hidden = self._trace.array(number, "proposal_hidden")[None]
                index = f"state that row {row} hands to draft decode"
                self._compare.floats(place, "draft.hidden_in", rows.hidden[row : row + 1], hidden, lambda _: index)
            self._root(number, place, rows, row)

    @stages("draft")
    def check_draft(self, number: int, record: Record) -> None:
        round, begins = self._round(record), record.request in self._begins
        self._begins.discard(record.request)
        if record.numbers.get("undrafted"):
            self._check_undrafted(record, round, begins=begins)
        elif self._model.mtp_layers:
            self._context.of(Layers).check_draft(Place(record, "draft"), round)
        elif record.numbers.get("in_graph"):
            draft_decode_in_graph(self._trace, self._compare, self.consumed_tokens, number, round)

    def _check_undrafted(self, record: Record, round: Round, *, begins: bool) -> None:
        """A tree that nobody drafted: a pipeline's last stage drafts when a round is over, and so for none that begins."""
        place = Place(record, "draft")
        if not (begins and self._trace.header.engine.pp > 1) and self._compare.on("draft.proposal"):
            self._compare.report(place, "draft.proposal", "the tree", "drafted when the round before was over", "never drafted")
        counted = list(range(len(round.drafted)))  # with the fix of pipeline-zeros
        nodes = counted if round.drafted == counted else [0] * len(counted)
        self._compare.integers(place, "verify.inputs", nodes, round.drafted, "node", 1)

    def _has_draft_decode(self, record: Record) -> bool:
        """Whether the tree is of draft decode: layers draft in their extend."""
        return not (record.numbers.get("undrafted") or self._model.mtp_layers)

    @rule(
        "draft.scratch_kv",
        "3.3",
        weights="yes",
        of_plain=(
            "3.10",
            "When draft() returns, the rows that draft decode wrote are those of the tokens it consumed, at M..M+num_steps-1.",
        ),
    )
    @stages("draft")
    def scratch(self, number: int, record: Record) -> None:
        """When draft() returns, the rows that draft decode wrote are those of the tokens it consumed, at M..M+num_steps-2."""
        if not (self._has_draft_decode(record) and self._model.numbers and self._model.memory):
            return
        replay, round = self._replay(record), self._round(record)
        committed, growth = round.committed, replay.growths[record.round]
        if "hole_kv" in record.tensors:
            self._holes(number, Place(record, "draft"), replay, round)
        stored = self._trace.array(number, "scratch_kv")
        topk, ahead = self._case.topk, self._model.ahead
        for step in range(ahead, round.steps):
            rows = stored[(step - ahead) * topk : (step - ahead + 1) * topk]

            def name(branch: int, step: int = step) -> str:
                of = f"branch {branch}, " if topk > 1 else ""
                return f"{of}row {committed + step - ahead} of draft decode step {step}"

            # of a plain language model step 0 runs the bonus token, on every branch alike
            expected = (
                growth.scratch[step - 1] if step else np.repeat(replay.stored["draft"][committed : committed + 1], topk, 0)
            )
            self._compare.stored_rows(Place(record, "draft", step), "draft.scratch_kv", expected[: len(rows)], rows, name)
            if self._model.chosen:
                self._context.of(Selection).check_step(Place(record, "draft", step), growth.chosen[step - 1])

    def _holes(self, number: int, place: Place, replay: RequestReplay, round: Round) -> None:
        """What begins a branch's first page is a copy of the committed rows of the page that the prefix ends in."""
        holes = self._trace.array(number, "hole_kv")
        inside = round.committed % self._case.page_size
        begun = replay.stored["draft"][round.committed - inside : round.committed]
        expected: Array = np.tile(begun, (self._case.topk - 1, 1, 1, 1, 1))

        def name(hole: int) -> str:
            return f"copy of row {round.committed - inside + hole % inside} for branch {1 + hole // inside}"

        self._compare.stored_rows(place, "draft.scratch_kv", expected, holes, name)

    def note_proposal(self, number: int, request: str) -> list[int]:
        """Note what the last committed row of a request proposes to its next round."""
        proposed = self._proposed[request] = self._in_targets_ids(self._trace.integers(number, "proposal"))
        return proposed

    def _root(self, number: int, place: Place, rows: ReferenceRows, last: int) -> None:
        """What the last committed row proposes to the next round: the k best tokens of its logits, in order."""
        logits = rows.logits[last : last + 1]
        proposed = self.note_proposal(number, place.record.request)
        if self._case.draws_drafts(place.record.request):
            self._compare.not_seen(("draft.proposal",), 1)  # the coins are not recorded; sampling.py judges the distribution
        else:
            self._compare.choices(place, "draft.proposal", logits, [proposed], lambda _, rank: self._child(0, 0, rank))
        if rows.logs is None:
            return
        reported = logs(self._trace.array(number, "proposal_probabilities")[None])
        inside = [
            min(max(0, token), logits.shape[1] - 1) for token in proposed
        ]  # one outside the vocabulary was reported above
        expected: Array = np.maximum(rows.logs[last : last + 1, inside], SMALLEST_LOG)
        name = "log-probabilities of the root's children"
        self._compare.floats(place, "draft.proposal", expected, reported, lambda _: name, log_scale(logits))

    def _in_targets_ids(self, ids: list[int]) -> list[int]:
        """What an extend proposes, in the target's vocabulary. The engine keeps ids of the draft's until it drafts on.

        An id outside the draft's vocabulary is moved past the target's, so that it is outside of that as well.
        """
        if not self._engine.draft_ids:
            return ids
        proposes, vocabulary = self._model.proposes, self._model.vocab_size
        return [proposes[n] if 0 <= n < len(proposes) else vocabulary + abs(n) for n in ids]

    def cut_off(self, record: Record, replay: RequestReplay, ids: list[int], position: int) -> None:
        """The token of a chain's draft decode step, by the proposal before it, where draft() never returned."""
        step = record.step
        if step > 1 and not self._case.draws_drafts(record.request):
            logits = replay.growths[record.round].logits[step - 1 : step]
            place = Place(record, "draft", step - 1, output=True)
            self._compare.choices(place, "draft.proposal", logits, [ids], lambda _, rank: self._child(step - 1, 0, rank))
        elif step == 1 and record.request in self._proposed:
            proposed = self._proposed[record.request]
            self._compare.integers(Place(record, "draft", step), "draft.input_ids", proposed, ids, "row", position)

    def consumed_tokens(self, round: Round, step: int, ids: list[int]) -> list[int]:
        """Tokens that draft decode step `step` must have consumed: its frontier's, as far as the trace shows them elsewhere."""
        topk = self._case.topk
        known = dict(enumerate(round.proposed)) or dict(zip(round.selected, round.drafted, strict=False))
        frontier = round.expanded[(step - 1) * topk : step * topk]
        return [known.get(candidate, token) for candidate, token in zip(frontier, ids, strict=False)]

    @rule("tree.tokens", "3.4", weights="in part")
    @stages("draft")
    def check_choice(self, number: int, record: Record) -> None:
        """The verify tree is the num_draft_tokens - 1 best of all candidates, in the order of their numbers."""
        replay, round, numbers = self._replay(record), self._round(record), self._model.numbers
        if not self._has_draft_decode(record):
            return
        if numbers:
            self._proposals(record, replay, round)
        else:
            self._candidates(record, round)
        if self._case.topk > 1:
            self._choices(record, round)
        if self._case.topk > 1 and numbers:
            self._scores(number, record, replay)

    @rule("tree.parents", "3.4", weights="in part")
    @stages("draft")
    def parents(self, _number: int, record: Record) -> None:
        """A frontier holds the topk best candidates of its depth, best first, and each node has a node for a parent."""
        round = self._round(record)
        if parents_of(self._case, round) is None and self._compare.on("tree.parents"):
            place = Place(record, "draft", round.steps)
            expected = f"{round.nodes - 1} candidates, the parent of each among them"
            self._compare.report(place, "tree.parents", "selected candidates", expected, str(round.selected))

    def _shape(self, record: Record) -> _Shape | None:
        parents = parents_of(self._case, self._round(record))
        return None if parents is None else _shape(parents)

    @rule("tree.positions", "3.4", weights="no")
    @stages("draft")
    def positions(self, number: int, record: Record) -> None:
        """Node n of the verify tree stands at position M + its depth."""
        if (shape := self._shape(record)) is not None:
            expected = [self._round(record).committed + depth for depth in shape.depths]
            self._same(record, "tree.positions", expected, number, "positions", "position of node")

    @rule("tree.mask", "3.4", weights="no")
    @stages("draft")
    def mask(self, number: int, record: Record) -> None:
        """A node sees the committed prefix, its own ancestors and itself."""
        if not self._engine.trees or (shape := self._shape(record)) is None:
            return
        place, exact = Place(record, "draft", self._round(record).steps), shape.mask
        if "mask" not in record.tensors and not self._model.numbers:  # a server's backend may need none of a chain
            self._compare.not_seen(("tree.mask",), 1)
            return
        mask = self._trace.array(number, "mask").tolist()
        if mask == exact:
            self._compare.on("tree.mask")
        elif len(mask) != len(exact):
            self._compare.integers(place, "tree.mask", [len(exact)], [len(mask)], "rows of the mask, round", record.round)
        else:
            node = next((node for node, row in enumerate(exact) if mask[node : node + 1] != [row]), 0)
            exact_row, own_row = (list(map(int, rows[node])) for rows in (exact, mask))
            self._compare.integers(place, "tree.mask", exact_row, own_row, f"mask of node {node}, node", 0)

    @rule("tree.retrieve", "3.4", weights="no")
    @stages("draft")
    def links(self, number: int, record: Record) -> None:
        """The links of each node lead to its first child and to its parent's next child."""
        if self._engine.trees and (shape := self._shape(record)) is not None:
            self._same(record, "tree.retrieve", [*range(len(shape.first))], number, "retrieve_index", "index of node")
            self._same(record, "tree.retrieve", shape.first, number, "next_token", "first child of node")
            self._same(record, "tree.retrieve", shape.sibling, number, "next_sibling", "next sibling of node")

    def _same(self, record: Record, rule: str, expected: list[int], number: int, name: str, rows: str) -> None:
        place = Place(record, "draft", self._round(record).steps)
        self._compare.integers(place, rule, expected, self._trace.integers(number, name), rows, 0)

    def _proposals(self, record: Record, replay: RequestReplay, round: Round) -> None:
        """Each candidate's token is the one that its row proposed at that rank."""
        topk, steps, growth = self._case.topk, round.steps, replay.growths[record.round]
        shown = self._candidates(record, round)
        if self._case.draws_drafts(record.request):
            self._compare.not_seen(("draft.proposal",), max(steps - self._model.first_step, 0))
            return
        if not self._model.first_step:  # the root's children are chosen here too, and not by the extend before

            def child(_: int, rank: int) -> str:
                return self._child(0, 0, rank)

            place = Place(record, "draft", output=True)
            self._compare.choices(place, "draft.proposal", growth.logits[:1], [shown[:topk]], child)
        rows = [shown[first : first + topk] for first in range(topk, len(shown), topk)]
        for step in range(1, steps):
            branches = slice((step - 1) * topk, step * topk)
            logits = growth.logits[1 + branches.start : 1 + branches.stop]

            def name(row: int, rank: int, step: int = step) -> str:
                return self._child(step, row, rank)

            place = Place(record, "draft", step, output=True)
            self._compare.choices(place, "draft.proposal", logits, rows[branches], name)

    def _candidates(self, record: Record, round: Round) -> list[int]:
        """Check how many candidates a round has, and the root's children; the tokens of all, as in `_visible_tokens`."""
        if round.proposed:
            total = count_candidates(self._case.topk, round.steps)
            self._compare.integers(
                Place(record, "draft"), "draft.proposal", [total], [len(round.proposed)], "number of candidates", 0
            )
        shown, topk = self._visible_tokens(round), self._case.topk
        # the extend before proposed the root's children, and was judged: they must be those very tokens
        proposed = self._proposed.get(record.request)
        if proposed == [] and self._compare.on("draft.proposal"):  # it was not to have another round
            place, use = Place(record, "draft"), "a round of this request uses it"
            self._compare.report(place, "draft.proposal", "what the round before proposes", use, "nothing: it was skipped")
        elif proposed is not None and shown:  # a round of no steps uses no proposal
            expected = [token if seen != UNSEEN else UNSEEN for token, seen in zip(proposed, shown[:topk], strict=True)]
            self._compare.integers(Place(record, "draft"), "draft.proposal", expected, shown[:topk], "token of candidate", 0)
        return shown

    def _visible_tokens(self, round: Round) -> list[int]:
        """Tokens of all candidates of a round, as far as the trace shows them; else UNSEEN."""
        total = count_candidates(self._case.topk, round.steps)
        if round.proposed:
            return (round.proposed + [UNSEEN] * total)[:total]
        shown = [UNSEEN] * total
        for candidates, tokens in ((round.expanded, round.frontier), (round.selected, round.drafted)):
            for candidate, token in zip(candidates, tokens, strict=False):
                if 0 <= candidate < total:
                    shown[candidate] = token
        return shown

    def _scores(self, number: int, record: Record, replay: RequestReplay) -> None:
        """The scores of all candidates: products of probabilities, as numbers."""
        if "candidate_scores" not in record.tensors:
            return
        choices, reported = replay.choices[record.round], self._trace.array(number, "candidate_scores")
        place = Place(record, "draft", self._case.num_steps)
        expected, scores, sizes = choices.scores[:, None], logs(reported), choices.sizes

        def name(candidate: int) -> str:
            return f"logarithm of the score of candidate {candidate}"

        self._compare.floats(place, "draft.proposal", expected, scores[:, None], name, sizes)

    def _child(self, step: int, branch: int, rank: int) -> str:
        if self._case.topk == 1:
            return f"d[{step + 1}]"
        who = f"branch {branch} of draft decode step {step}" if step else "the root"
        return f"child {rank} of {who}"

    def _choices(self, record: Record, round: Round) -> None:
        """The frontiers and the final selection hold the candidates of the largest scores; where the reference cannot compute
        the numbers, only what a choice is, whichever it is."""
        topk, all_of_root = self._case.topk, list(range(self._case.topk))
        choices = self._replay(record).choices[record.round] if self._model.numbers else None
        place, frontier = Place(record, "draft", output=True), round.expanded[:topk] or all_of_root
        self._compare.integers(place, "tree.parents", all_of_root, frontier, "frontier 1, place", 0)
        for step in range(1, round.steps - 1):
            place, frontier = Place(record, "draft", step, output=True), round.expanded[step * topk : (step + 1) * topk]
            first, last = count_candidates(topk, step), count_candidates(topk, step + 1)
            whole = len({one for one in frontier if first <= one < last}) == topk  # none of another depth, or twice
            if whole and choices is not None:
                self._compare.ranking(place, "tree.parents", choices.frontiers[step - 1], f"frontier {step + 1}")
            elif self._compare.on("tree.parents") and not whole:
                expected = f"{topk} different candidates of depth {step + 1}"
                self._compare.report(place, "tree.parents", f"frontier {step + 1}", expected, str(frontier))
        if not self._ascends(record, round):
            return
        place = Place(record, "draft", round.steps - 1, output=True)
        if choices is not None and choices.selected is not None:
            self._compare.ranking(place, "tree.tokens", choices.selected, "the final selection, best first")
        if round.proposed:
            tokens = [round.proposed[node] for node in round.selected if node < len(round.proposed)]
            self._compare.integers(place, "tree.tokens", tokens, round.drafted, "token of node", 1)

    def _ascends(self, record: Record, round: Round) -> bool:
        """Whether the final selection is one: different candidates, in the order of their numbers."""
        total = count_candidates(self._case.topk, round.steps)
        if sorted({node for node in round.selected if 0 <= node < total}) == round.selected:
            return True
        if self._compare.on("tree.tokens"):
            place = Place(record, "draft", round.steps - 1, output=True)
            expected = "different candidates in the order of their numbers"
            self._compare.report(place, "tree.tokens", "the final selection", expected, str(round.selected))
        return False
