"""The draft tree of a round: `draft.proposal` and `tree.*`. A chain is the tree of topk = 1. Called by requests.py.

What the engine chose is followed (story.py), so each choice is judged as if all before it had been right.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.records import Record
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.weights import model_pair
from eagletwin.reference.sizes import count_candidates
from eagletwin.reference.tree import ancestor_mask, depths, retrieve_links, tree_parents

from .compare import UNSEEN, Compare, Place
from .rows import SMALLEST_LOG, log_scale, logs
from .story import ReferenceRows, Round, Story


def parents_of(case: Case, round: Round) -> tuple[int, ...] | None:
    """Parents of the nodes [D]; None if the selected nodes do not form a tree."""
    return _parents(case.topk, case.num_steps, case.verify_nodes, tuple(round.selected), tuple(round.expanded))


@lru_cache(maxsize=256)  # asked for three times a round; all rounds of a chain have the same
def _parents(
    topk: int, num_steps: int, num_draft_tokens: int, selected: tuple[int, ...], expanded: tuple[int, ...]
) -> tuple[int, ...] | None:
    total = count_candidates(topk, num_steps)
    if len(selected) != num_draft_tokens - 1 or any(not 0 <= node < total for node in selected):
        return None
    try:
        parents = tree_parents(selected, topk, expanded)
    except ValueError:
        return None
    # a wrong frontier may make a node the child of one that comes after it, or of itself
    return tuple(parents) if all(parent < node for node, parent in enumerate(parents)) else None


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


class Trees:
    """Compares the trees of one trace."""

    def __init__(self, trace: Trace, compare: Compare) -> None:
        self._trace = trace
        self._compare = compare
        self._case = trace.header.case
        self._proposed: dict[str, list[int]] = {}  # request -> what the root row of its next round proposed
        self._proposes: list[int] = model_pair(self._case.model).proposes.tolist()  # by the recipe, whatever the engine loaded

    def root(self, number: int, place: Place, rows: ReferenceRows, last: int) -> None:
        """What the last committed row proposes to the next round: the k best tokens of its logits, in order."""
        logits = rows.logits[last : last + 1]
        proposed = self._in_targets_ids(self._trace.integers(number, "proposal"))
        self._proposed[place.record.request] = proposed
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
        proposes, vocabulary = self._proposes, RECIPES[self._case.model].target.vocab_size
        return [proposes[n] if 0 <= n < len(proposes) else vocabulary + abs(n) for n in ids]

    def cut_off(self, record: Record, story: Story, ids: list[int], position: int) -> None:
        """The token of a chain's draft decode step, by the proposal before it, where draft() never returned."""
        step = record.step
        if step > 1 and not self._case.draws_drafts(record.request):
            logits = story.growths[record.round].logits[step - 1 : step]
            place = Place(record, "draft", step - 1, output=True)
            self._compare.choices(place, "draft.proposal", logits, [ids], lambda _, rank: self._child(step - 1, 0, rank))
        elif step == 1 and record.request in self._proposed:
            proposed = self._proposed[record.request]
            self._compare.integers(Place(record, "draft", step), "draft.input_ids", proposed, ids, "row", position)

    def consumed(self, round: Round, step: int, ids: list[int]) -> list[int]:
        """Tokens that draft decode step `step` must have consumed: its frontier's, as far as the trace shows them elsewhere."""
        topk = self._case.topk
        known = dict(enumerate(round.proposed)) or dict(zip(round.selected, round.drafted, strict=False))
        frontier = round.expanded[(step - 1) * topk : step * topk]
        return [known.get(candidate, token) for candidate, token in zip(frontier, ids, strict=False)]

    def grown(self, number: int, record: Record, story: Story, round: Round) -> None:
        """The tree that draft() returned, from the proposals to the masks."""
        self._proposals(record, story, round)
        if self._case.topk > 1:
            self._choices(record, story, round)
            self._scores(number, record, story)
        self.shape(number, record, round)

    def shape(self, number: int, record: Record, round: Round) -> None:
        """What follows from who is whose parent: positions, masks and links."""
        place = Place(record, "draft", self._case.num_steps)
        parents = parents_of(self._case, round)
        if parents is None:
            if self._compare.on("tree.parents"):
                expected = f"{self._case.verify_nodes - 1} candidates, the parent of each among them"
                self._compare.report(place, "tree.parents", "selected candidates", expected, str(round.selected))
            return
        shape, mask = _shape(parents), self._trace.array(number, "mask").tolist()
        positions = [round.committed + depth for depth in shape.depths]
        self._same(place, "tree.positions", positions, number, "positions", "position of node")
        if mask == shape.mask:
            self._compare.on("tree.mask")
        elif len(mask) != len(shape.mask):
            self._compare.integers(place, "tree.mask", [len(shape.mask)], [len(mask)], "rows of the mask, round", record.round)
        else:
            node = next((node for node, row in enumerate(shape.mask) if mask[node : node + 1] != [row]), 0)
            exact_row, own_row = (list(map(int, rows[node])) for rows in (shape.mask, mask))
            self._compare.integers(place, "tree.mask", exact_row, own_row, f"mask of node {node}, node", 0)
        self._same(place, "tree.retrieve", list(range(len(parents))), number, "retrieve_index", "index of node")
        self._same(place, "tree.retrieve", shape.first, number, "next_token", "first child of node")
        self._same(place, "tree.retrieve", shape.sibling, number, "next_sibling", "next sibling of node")

    def _same(self, place: Place, rule: str, expected: list[int], number: int, name: str, rows: str) -> None:
        self._compare.integers(place, rule, expected, self._trace.integers(number, name), rows, 0)

    def _proposals(self, record: Record, story: Story, round: Round) -> None:
        """Each candidate's token is the one that its row proposed at that rank."""
        topk, steps, growth = self._case.topk, self._case.num_steps, story.growths[record.round]
        shown = list(round.proposed)
        if shown:
            total = count_candidates(topk, steps)
            self._compare.integers(Place(record, "draft"), "draft.proposal", [total], [len(shown)], "number of candidates", 0)
            shown = (shown + [UNSEEN] * total)[:total]
        else:
            shown = [UNSEEN] * count_candidates(topk, steps)
            for candidates, tokens in ((round.expanded, round.frontier), (round.selected, round.drafted)):
                for candidate, token in zip(candidates, tokens, strict=False):
                    if 0 <= candidate < len(shown):
                        shown[candidate] = token
        if record.request in self._proposed:  # the extend before proposed these, and was judged: they must be those very tokens
            proposed = self._proposed[record.request]
            expected = [
                token if shown_token != UNSEEN else UNSEEN for token, shown_token in zip(proposed, shown[:topk], strict=True)
            ]
            self._compare.integers(Place(record, "draft"), "draft.proposal", expected, shown[:topk], "token of candidate", 0)
        if self._case.draws_drafts(record.request):
            self._compare.not_seen(("draft.proposal",), steps - 1)
            return
        rows = [shown[first : first + topk] for first in range(topk, len(shown), topk)]
        for step in range(1, steps):
            branches = slice((step - 1) * topk, step * topk)
            logits = growth.logits[1 + branches.start : 1 + branches.stop]

            def name(row: int, rank: int, step: int = step) -> str:
                return self._child(step, row, rank)

            place = Place(record, "draft", step, output=True)
            self._compare.choices(place, "draft.proposal", logits, rows[branches], name)

    def _scores(self, number: int, record: Record, story: Story) -> None:
        """The scores of all candidates: products of probabilities, as numbers."""
        if "candidate_scores" not in record.tensors:
            return
        choices, reported = story.choices[record.round], self._trace.array(number, "candidate_scores")
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

    def _choices(self, record: Record, story: Story, round: Round) -> None:
        """The frontiers and the final selection hold the candidates of the largest scores."""
        topk, choices = self._case.topk, story.choices[record.round]
        first = Place(record, "draft", output=True)
        self._compare.integers(
            first, "tree.parents", list(range(topk)), round.expanded[:topk] or list(range(topk)), "frontier 1, place", 0
        )
        for step, ranked in enumerate(choices.frontiers, 1):
            place, name = Place(record, "draft", step, output=True), f"frontier {step + 1}"
            frontier = round.expanded[step * topk : (step + 1) * topk]
            if frontier != ranked.actual or len(set(frontier)) < topk:  # of another depth, or one of them twice
                if self._compare.on("tree.parents"):
                    expected = f"{topk} different candidates of depth {step + 1}"
                    self._compare.report(place, "tree.parents", name, expected, str(frontier))
                continue
            self._compare.ranked(place, "tree.parents", ranked, name)
        place = Place(record, "draft", self._case.num_steps - 1, output=True)
        total = count_candidates(topk, self._case.num_steps)
        ascending = sorted({node for node in round.selected if 0 <= node < total})
        if ascending != round.selected or choices.selected is None:
            if self._compare.on("tree.tokens"):
                expected = "different candidates in the order of their numbers"
                self._compare.report(place, "tree.tokens", "the final selection", expected, str(round.selected))
            return
        self._compare.ranked(place, "tree.tokens", choices.selected, "the final selection, best first")
        if round.proposed:
            tokens = [round.proposed[node] for node in round.selected if node < len(round.proposed)]
            self._compare.integers(place, "tree.tokens", tokens, round.drafted, "token of node", 1)
