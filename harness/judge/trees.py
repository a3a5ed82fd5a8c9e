"""The draft tree of a round as the engine left it: who is whose parent, and for drawings the nodes that a divergence is about.

Read from the trace alone: a wrong tree is read as it is wrong, and of links that do not form a tree the connected part counts.
"""

import re
from dataclasses import dataclass, field
from functools import lru_cache

from eagletwin.harness.core.case import Case
from eagletwin.harness.core.records import Key
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.core.verdict import Divergence
from eagletwin.reference.sizes import count_candidates
from eagletwin.reference.tree import parent_of, tree_parents

from .replay import Round


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
