"""The draft tree of a round: `draft.proposal` and `tree.*`. A chain is the tree of topk = 1. Called by requests.py.

What the engine chose is followed (replay.py), so each choice is judged as if all before it had been right.
"""

import re
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.records import Key, Record
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.core.verdict import Divergence
from eagletwin.reference.sizes import count_candidates
from eagletwin.reference.tree import ancestor_mask, depths, parent_of, retrieve_links, tree_parents

from .bounds import SMALLEST_LOG, log_scale, logs
from .compare import UNSEEN, Compare, Place
from .model import Model
from .replay import ReferenceRows, RequestReplay, Round


def parents_of(case: Case, round: Round) -> tuple[int, ...] | None:
    """Parents of the nodes [D]; None if the selected nodes do not form a tree."""
    return _parents(case.topk, round.steps, round.nodes, tuple(round.selected), tuple(round.expanded))


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

    def __init__(self, trace: Trace, compare: Compare, model: Model) -> None:
        self._trace = trace
        self._compare = compare
        self._case = trace.header.case
        self._proposed: dict[str, list[int]] = {}  # request -> what the root row of its next round proposed
        self._model = model

    def proposed(self, number: int, request: str) -> list[int]:
        """Note what the last committed row of a request proposes to its next round."""
        proposed = self._proposed[request] = self._in_targets_ids(self._trace.integers(number, "proposal"))
        return proposed

    def root(self, number: int, place: Place, rows: ReferenceRows, last: int) -> None:
        """What the last committed row proposes to the next round: the k best tokens of its logits, in order."""
        logits = rows.logits[last : last + 1]
        proposed = self.proposed(number, place.record.request)
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

    def consumed(self, round: Round, step: int, ids: list[int]) -> list[int]:
        """Tokens that draft decode step `step` must have consumed: its frontier's, as far as the trace shows them elsewhere."""
        topk = self._case.topk
        known = dict(enumerate(round.proposed)) or dict(zip(round.selected, round.drafted, strict=False))
        frontier = round.expanded[(step - 1) * topk : step * topk]
        return [known.get(candidate, token) for candidate, token in zip(frontier, ids, strict=False)]

    def grown(self, number: int, record: Record, replay: RequestReplay, round: Round) -> None:
        """The tree that draft() returned, from the proposals to the masks."""
        self._proposals(record, replay, round)
        if self._case.topk > 1:
            self._choices(record, replay, round)
            self._scores(number, record, replay)
        self.shape(number, record, round)

    def grown_by_tokens(self, record: Record, round: Round) -> None:
        """The same of a tree whose numbers the reference cannot compute: tokens, and what a choice is, whichever it is."""
        topk, steps = self._case.topk, round.steps
        if round.proposed:
            total = count_candidates(topk, steps)
            self._compare.integers(
                Place(record, "draft"), "draft.proposal", [total], [len(round.proposed)], "number of candidates", 0
            )
        shown = self._shown(round)
        self._continues(record, shown)
        if topk == 1:
            return
        self._first_frontier(record, round)
        for step in range(1, steps - 1):
            first, frontier = count_candidates(topk, step), round.expanded[step * topk : (step + 1) * topk]
            if self._compare.on("tree.parents"):
                last = count_candidates(topk, step + 1)
                if len({one for one in frontier if first <= one < last}) < topk:
                    self._no_frontier(record, step, frontier)
        if self._ascends(record, round):
            self._nodes_are_candidates(record, round)

    def shape(self, number: int, record: Record, round: Round) -> None:
        """What follows from who is whose parent: positions, masks and links."""
        place = Place(record, "draft", round.steps)
        parents = parents_of(self._case, round)
        if parents is None:
            if self._compare.on("tree.parents"):
                expected = f"{round.nodes - 1} candidates, the parent of each among them"
                self._compare.report(place, "tree.parents", "selected candidates", expected, str(round.selected))
            return
        shape = _shape(parents)
        positions = [round.committed + depth for depth in shape.depths]
        self._same(place, "tree.positions", positions, number, "positions", "position of node")
        self._mask(number, place, shape.mask)
        self._same(place, "tree.retrieve", list(range(len(parents))), number, "retrieve_index", "index of node")
        self._same(place, "tree.retrieve", shape.first, number, "next_token", "first child of node")
        self._same(place, "tree.retrieve", shape.sibling, number, "next_sibling", "next sibling of node")

    def _mask(self, number: int, place: Place, exact: list[list[bool]]) -> None:
        record = place.record
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

    def _same(self, place: Place, rule: str, expected: list[int], number: int, name: str, rows: str) -> None:
        self._compare.integers(place, rule, expected, self._trace.integers(number, name), rows, 0)

    def _proposals(self, record: Record, replay: RequestReplay, round: Round) -> None:
        """Each candidate's token is the one that its row proposed at that rank."""
        topk, steps, growth = self._case.topk, round.steps, replay.growths[record.round]
        if round.proposed:
            total = count_candidates(topk, steps)
            self._compare.integers(
                Place(record, "draft"), "draft.proposal", [total], [len(round.proposed)], "number of candidates", 0
            )
        shown = self._shown(round)
        self._continues(record, shown)
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

    def _shown(self, round: Round) -> list[int]:
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

    def _continues(self, record: Record, shown: list[int]) -> None:
        """The extend before proposed the root's children, and was judged: they must be those very tokens."""
        if record.request not in self._proposed or not shown:  # a round of no steps uses no proposal
            return
        topk, proposed = self._case.topk, self._proposed[record.request]
        expected = [token if seen != UNSEEN else UNSEEN for token, seen in zip(proposed, shown[:topk], strict=True)]
        self._compare.integers(Place(record, "draft"), "draft.proposal", expected, shown[:topk], "token of candidate", 0)

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

    def _choices(self, record: Record, replay: RequestReplay, round: Round) -> None:
        """The frontiers and the final selection hold the candidates of the largest scores."""
        topk, choices = self._case.topk, replay.choices[record.round]
        self._first_frontier(record, round)
        for step, ranked in enumerate(choices.frontiers, 1):
            frontier = round.expanded[step * topk : (step + 1) * topk]
            if frontier != ranked.actual or len(set(frontier)) < topk:  # of another depth, or one of them twice
                if self._compare.on("tree.parents"):
                    self._no_frontier(record, step, frontier)
                continue
            self._compare.ranked(Place(record, "draft", step, output=True), "tree.parents", ranked, f"frontier {step + 1}")
        if not self._ascends(record, round) or choices.selected is None:
            return
        place = Place(record, "draft", round.steps - 1, output=True)
        self._compare.ranked(place, "tree.tokens", choices.selected, "the final selection, best first")
        self._nodes_are_candidates(record, round)

    def _first_frontier(self, record: Record, round: Round) -> None:
        place, all_of_root = Place(record, "draft", output=True), list(range(self._case.topk))
        frontier = round.expanded[: self._case.topk] or all_of_root
        self._compare.integers(place, "tree.parents", all_of_root, frontier, "frontier 1, place", 0)

    def _no_frontier(self, record: Record, step: int, frontier: list[int]) -> None:
        expected = f"{self._case.topk} different candidates of depth {step + 1}"
        place = Place(record, "draft", step, output=True)
        self._compare.report(place, "tree.parents", f"frontier {step + 1}", expected, str(frontier))

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

    def _nodes_are_candidates(self, record: Record, round: Round) -> None:
        if round.proposed:
            tokens = [round.proposed[node] for node in round.selected if node < len(round.proposed)]
            place = Place(record, "draft", round.steps - 1, output=True)
            self._compare.integers(place, "tree.tokens", tokens, round.drafted, "token of node", 1)


# The draft tree of a round as the engine left it, with the nodes that a divergence is about marked: for drawings of it.
#
# Read from the trace alone: a wrong tree is read as it is wrong, and of links that do not form a tree the connected part
# counts.

_RULES, _STAGES = ("tree.", "verify.", "commit."), ("draft.decode", "draft")
ROOT = -1


@dataclass(slots=True)
class DraftTree:
    """Candidates by number, the root -1: their tokens, as far as the trace shows them, and the nodes of those selected.

    expanded [(S-1)*k] the frontiers, accepted: nodes, marks: candidate -> what the divergence says of it
    """

    topk: int
    committed: int
    node: dict[int, int]
    token: dict[int, int]
    expanded: list[int]
    accepted: list[int]
    marks: dict[int, list[str]] = field(default_factory=dict)

    def parent(self, candidate: int) -> int:
        """The root for what hangs nowhere: its parent would be one that comes later, or was never expanded."""
        if not self.topk <= candidate < self.topk * (len(self.expanded) + 1):
            return ROOT
        parent = parent_of(candidate, self.topk, self.expanded)
        return parent if ROOT < parent < candidate else ROOT

    def way_to(self, candidate: int) -> list[int]:
        """From below the root to the candidate."""
        way = [candidate]
        while self.parent(way[0]) != ROOT:
            way.insert(0, self.parent(way[0]))
        return way


def tree_of(trace: Trace, found: Divergence) -> DraftTree | None:
    """The tree that a divergence is about; None where it is about none."""
    if trace.header.case.topk == 1 or not (found.rule.startswith(_RULES) or found.stage in _STAGES):
        return None
    numbers = {record.key: number for number, record in enumerate(trace.header.records)}
    number = numbers.get(Key(found.request, found.round, "draft"))
    if number is None or trace.header.records[number].numbers.get("undrafted"):  # draft() never returned, or was not called
        return None
    tree = _read(trace, numbers, number, found)
    _mark(tree, found)
    return tree


def _read(trace: Trace, numbers: dict[Key, int], number: int, found: Divergence) -> DraftTree:
    case, selected, tokens = trace.header.case, trace.integers(number, "selected"), trace.integers(number, "tokens")
    expanded = trace.integers(number, "expanded")
    consumed: list[int] = []
    for step in range(1, case.num_steps):
        decode = numbers.get(Key(found.request, found.round, "draft.decode", step))
        consumed += [] if decode is None else trace.integers(decode, "input_ids")
    token = dict(zip(expanded, consumed, strict=False)) | dict(zip(selected, tokens[1:], strict=False)) | {ROOT: tokens[0]}
    node = {ROOT: 0} | {candidate: number for number, candidate in enumerate(selected, 1)}
    verify = numbers.get(Key(found.request, found.round, "verify"))
    accepted = [] if verify is None else trace.integers(verify, "accept_index")
    return DraftTree(case.topk, trace.header.records[number].numbers["seq_len"], node, token, expanded, accepted)


def _mark(tree: DraftTree, found: Divergence) -> None:
    """What the words of the divergence name: nodes, candidates, branches of a draft decode step, children of a branch."""
    candidate = {node: candidate for candidate, node in tree.node.items()}

    def mark(which: int | None, text: str) -> None:
        if which is not None and text not in tree.marks.setdefault(which, []):
            tree.marks[which].append(text)

    expanded, accepted = dict(enumerate(tree.expanded)), dict(enumerate(tree.accepted))
    for text, said in (("expected", found.expected), ("actual", found.actual)):
        if name := re.fullmatch(r"candidate (-?\d+)", said):
            mark(int(name[1]), text)
        if found.index.startswith("accepted node") and said.isdigit():
            mark(candidate.get(int(said)), text)
    if which := re.match(r"child (\d+) of (?:branch (\d+) of draft decode step (\d+)|the root)", found.index):
        proposer = 0 if which[2] is None else 1 + (int(which[3]) - 1) * tree.topk + int(which[2])
        mark(proposer * tree.topk + int(which[1]), "here")
    elif branch := re.search(r"branch (\d+)", found.index):
        mark(expanded.get((max(found.step, 1) - 1) * tree.topk + int(branch[1])), "here")
    elif token := re.match(r"token of candidate (\d+)", found.index):
        mark(int(token[1]), "here")
    elif place := re.match(r"(?:committed token|(?:token committed after|state of) accepted node) (\d+)", found.index):
        mark(candidate.get(accepted.get(int(place[1]), -1)), "here")
    elif (row := re.match(r"row (\d+)", found.index)) and found.rule.startswith("commit."):
        mark(candidate.get(accepted.get(int(row[1]) - tree.committed, -1)), "here")
    elif (node := re.search(r"node (\d+)", found.index)) and not found.index.startswith("accepted"):
        mark(candidate.get(int(node[1])), "here")
