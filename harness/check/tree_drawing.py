"""The draft tree of a divergence as text, with the nodes that it is about marked. Called by argument.py.

Drawn from the trace alone, as the engine left it: a wrong tree is drawn wrong, and of links that do not form a tree the
connected part is drawn. docs/explanation/trees.md shows how to read it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from eagletwin.harness.core.records import Key
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.core.verdict import Divergence
from eagletwin.harness.core.words import count
from eagletwin.reference.tree import parent_of

# A tree of more nodes is cut down to what is marked or accepted, the way there, and its siblings.
MOST_LINES = 40

_RULES, _STAGES = ("tree.", "verify.", "commit."), ("draft.decode", "draft")
_ROOT = -1


@dataclass(slots=True)
class _Tree:
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
            return _ROOT
        parent = parent_of(candidate, self.topk, self.expanded)
        return parent if _ROOT < parent < candidate else _ROOT

    def way_to(self, candidate: int) -> list[int]:
        """From below the root to the candidate."""
        way = [candidate]
        while self.parent(way[0]) != _ROOT:
            way.insert(0, self.parent(way[0]))
        return way


def draw(trace: Trace, found: Divergence) -> list[str]:
    """Lines of the tree that a divergence is about; none where it is about none."""
    if trace.header.case.topk == 1 or not (found.rule.startswith(_RULES) or found.stage in _STAGES):
        return []
    numbers = {record.key: number for number, record in enumerate(trace.header.records)}
    number = numbers.get(Key(found.request, found.round, "draft"))
    if number is None:  # draft() never returned
        return []
    tree = _read(trace, numbers, number, found)
    _mark(tree, found)
    selected, at = len(tree.node) - 1, trace.header.records[number].numbers["seq_len"]
    behind = f"{count(selected, 'node')} behind the bonus token at position {at}"
    head = f"The tree of request {found.request}, round {found.round}: {behind}."
    return [head, "", *_lines(tree)]


def _read(trace: Trace, numbers: dict[Key, int], number: int, found: Divergence) -> _Tree:
    case, selected, tokens = trace.header.case, trace.integers(number, "selected"), trace.integers(number, "tokens")
    expanded = trace.integers(number, "expanded")
    consumed: list[int] = []
    for step in range(1, case.num_steps):
        decode = numbers.get(Key(found.request, found.round, "draft.decode", step))
        consumed += [] if decode is None else trace.integers(decode, "input_ids")
    token = dict(zip(expanded, consumed, strict=False)) | dict(zip(selected, tokens[1:], strict=False)) | {_ROOT: tokens[0]}
    node = {_ROOT: 0} | {candidate: number for number, candidate in enumerate(selected, 1)}
    verify = numbers.get(Key(found.request, found.round, "verify"))
    accepted = [] if verify is None else trace.integers(verify, "accept_index")
    return _Tree(case.topk, trace.header.records[number].numbers["seq_len"], node, token, expanded, accepted)


def _mark(tree: _Tree, found: Divergence) -> None:
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


def _lines(tree: _Tree) -> Iterator[str]:
    shown = {candidate for known in (tree.node, tree.expanded, tree.marks) for candidate in known if candidate != _ROOT}
    for candidate in list(shown):
        shown.update(tree.way_to(candidate))
    hidden = 0
    if len(shown) > MOST_LINES:
        ends = {*tree.marks, *(candidate for candidate, node in tree.node.items() if node in tree.accepted)} - {_ROOT}
        kept = {candidate for end in ends for candidate in tree.way_to(end)}
        parents = {_ROOT, *(tree.parent(candidate) for candidate in kept)}
        kept |= {candidate for candidate in shown if tree.parent(candidate) in parents}
        hidden, shown = len(shown) - len(kept), kept
    children: dict[int, list[int]] = {}
    for candidate in sorted(shown):
        children.setdefault(tree.parent(candidate), []).append(candidate)
    rows = [("", _ROOT)]
    waiting = [("", candidate) for candidate in reversed(children.get(_ROOT, []))]
    while waiting:
        before, candidate = waiting.pop()
        last = candidate == children[tree.parent(candidate)][-1]
        rows.append((before + ("└─ " if last else "├─ "), candidate))
        waiting += [(before + ("   " if last else "│  "), child) for child in reversed(children.get(candidate, []))]
    names = [f"{line}{tree.node.get(candidate, '·')}: {tree.token.get(candidate, '?')}" for line, candidate in rows]
    width = max(map(len, names))
    for name, (_, candidate) in zip(names, rows, strict=True):
        accepted = "*" if tree.node.get(candidate) in tree.accepted else " "
        marks = "".join(f"   <── {mark}" for mark in tree.marks.get(candidate, []))
        yield f"{name:{width}} {accepted}  {_origin(tree, candidate)}{marks}".rstrip()
    yield ""
    yield "node: token, · for a candidate that was not selected" + ("; * accepted" if tree.accepted else "")
    if hidden:
        yield f"{hidden} more are not drawn"


def _origin(tree: _Tree, candidate: int) -> str:
    if candidate == _ROOT:
        return "root"
    at = tree.expanded.index(candidate) if candidate in tree.expanded else -1
    branch = f", step {at // tree.topk + 1} branch {at % tree.topk}" if at >= 0 else ""
    return f"candidate {candidate}{branch}"
