"""The draft tree of a divergence, drawn twice: as it must be and as it was. A chain is a tree of one branch.

The engine's choices before the first wrong one are followed, so the expected tree is what the engine should have drawn from
what it had until then.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from eagletwin.harness.core.records import Key
from eagletwin.harness.core.verdict import Divergence
from eagletwin.harness.judge.compare import Exhibit
from eagletwin.harness.judge.provenance import DivergenceContext
from eagletwin.harness.judge.trees import ROOT, DraftTree, tree_of

from .document import Node, TreePicture

_ACROSS, _DOWN, _EDGE = 74, 78, 44  # pixels between nodes, and to the border
_MOST_NODES = 120  # that are drawn
_OF_A_ROUND = ("draft.decode", "draft", "target.verify", "verify", "draft.extend_decode", "extend")


@dataclass(slots=True)
class _Side:
    """One of the two drawings. accepted: nodes. notes, wrong: by candidate"""

    tree: DraftTree
    notes: dict[int, str] = field(default_factory=dict)
    wrong: set[int] = field(default_factory=set)


def trees_of(context: DivergenceContext) -> tuple[TreePicture, ...]:
    """The tree that must be and the one that was; none where the divergence is about no round."""
    found = context.divergences[0]
    actual = tree_of(context.trace, found) or _chain(context, found)
    if actual is None:
        return ()
    expected = DraftTree(
        actual.topk, actual.committed, {**actual.node}, {**actual.token}, [*actual.expanded], [*actual.accepted]
    )
    sides = _Side(expected), _Side(actual)
    _choices(context, found, sides)
    if context.exhibit is not None:
        _annotate(found, context.exhibit, sides)
    for candidate in actual.marks:
        if not any(side.wrong for side in sides):
            sides[1].wrong.add(candidate)
            sides[0].notes.setdefault(candidate, _short(found.expected))
            sides[1].notes.setdefault(candidate, _short(found.actual))
    return _drawn("Expected", sides[0]), _drawn("Actual", sides[1])


def _short(text: str) -> str:
    """A value as a note below a node: what is long is said elsewhere."""
    return text if len(text) <= 10 else ""


def _chain(context: DivergenceContext, found: Divergence) -> DraftTree | None:
    """The drafts of a round with topk = 1: candidate n is d[n + 1] and node n + 1."""
    trace = context.trace
    if trace.header.case.topk > 1 or found.stage not in _OF_A_ROUND or not found.request:
        return None
    numbers = {record.key: number for number, record in enumerate(trace.header.records)}
    number = numbers.get(Key(found.request, found.round, "draft"))
    if number is None or "tokens" not in trace.header.records[number].tensors:
        return None
    tokens, drafts = trace.integers(number, "tokens"), range(len(trace.integers(number, "tokens")) - 1)
    verify = numbers.get(Key(found.request, found.round, "verify"))
    accepted = [] if verify is None else trace.integers(verify, "accept_index")
    node = {ROOT: 0} | {n: n + 1 for n in drafts}
    token = {ROOT: tokens[0]} | {n: tokens[n + 1] for n in drafts}
    committed = trace.header.records[number].numbers["seq_len"]
    tree = DraftTree(1, committed, node, token, list(drafts)[:-1], accepted)
    if where := re.match(r"d\[(\d+)\]", found.index):
        tree.marks[int(where[1]) - 1] = ["here"]
    elif found.stage in ("draft.decode", "draft") and found.step:
        tree.marks[found.step - 1] = ["here"]
    elif where := re.search(r"(?:node|token) (\d+)", found.index):
        tree.marks[int(where[1]) - 1] = ["here"]
    return tree


def _choices(context: DivergenceContext, found: Divergence, sides: tuple[_Side, _Side]) -> None:
    """What the reference chooses otherwise: a frontier, the final selection, the token of a candidate."""
    expected, actual = sides
    replay = context.replays.get(found.request)
    if found.rule == "draft.proposal":
        for candidate in actual.tree.marks:
            if found.expected.isdigit():
                expected.tree.token[candidate] = int(found.expected)
                expected.wrong.add(candidate)
                actual.wrong.add(candidate)
    if replay is None or found.round >= len(replay.choices) or found.rule not in ("tree.parents", "tree.tokens"):
        return
    choices = replay.choices[found.round]
    if found.rule == "tree.tokens" and choices.selected is not None and choices.selected.wrong:
        should, did = {*choices.selected.expected}, {*choices.selected.actual}
        expected.tree.node = {ROOT: 0} | {candidate: n for n, candidate in enumerate(sorted(should), 1)}
        expected.wrong |= should - did
        actual.wrong |= did - should
    for step, ranked in enumerate(choices.frontiers, 1):
        if found.rule == "tree.parents" and ranked.wrong:
            topk = actual.tree.topk
            expected.tree.expanded[step * topk : (step + 1) * topk] = ranked.expected
            expected.wrong |= {*ranked.expected} - {*ranked.actual}
            actual.wrong |= {*ranked.actual} - {*ranked.expected}
            break
    for candidate in expected.wrong:
        if candidate < len(choices.tokens):
            expected.tree.token.setdefault(candidate, choices.tokens[candidate])


def _annotate(found: Divergence, exhibit: Exhibit, sides: tuple[_Side, _Side]) -> None:
    """Values of nodes, where the comparison was of nodes: below each whose value differs, and the accepted path."""
    if not isinstance(exhibit.actual, list) or not isinstance(exhibit.expected, list):
        return
    candidates = {node: candidate for candidate, node in sides[1].tree.node.items()}
    if found.index.startswith("accepted node"):
        sides[0].tree.accepted = [*exhibit.expected]
        for side, path in zip(sides, (exhibit.expected, exhibit.actual), strict=True):
            side.wrong |= {candidates[node] for node in {*exhibit.expected} ^ {*exhibit.actual} if node in candidates and path}
        return
    if "node" not in exhibit.name(0):
        return
    for n in exhibit.wrong:
        node = re.search(r"node (\d+)$", exhibit.name(n))
        candidate = candidates.get(int(node[1])) if node else None
        if candidate is not None:
            for side, values in zip(sides, (exhibit.expected, exhibit.actual), strict=True):
                side.notes[candidate] = str(values[n])
                side.wrong.add(candidate)


def _drawn(title: str, side: _Side) -> TreePicture:
    tree = side.tree
    shown = {one for known in (tree.node, tree.expanded, tree.marks, side.wrong) for one in known if one != ROOT}
    for candidate in list(shown):
        shown.update(tree.way_to(candidate))
    kept = sorted(shown)[:_MOST_NODES]
    children: dict[int, list[int]] = {}
    for candidate in kept:
        children.setdefault(tree.parent(candidate), []).append(candidate)
    at = _placed(children)
    nodes = tuple(_node(side, candidate, at[candidate]) for candidate in sorted(at))
    edges = tuple((*at[parent], *at[child]) for parent, own in children.items() for child in own if parent in at)
    width, height = max(x for x, _ in at.values()) + _EDGE, max(y for _, y in at.values()) + _EDGE
    return TreePicture(
        title=title, width=width, height=height, nodes=nodes, edges=edges, words=_words(title, nodes, len(shown))
    )


def _placed(children: Mapping[int, list[int]]) -> dict[int, tuple[int, int]]:
    """Where each node stands: leaves side by side, each parent over the middle of its children, whatever the depth."""
    order, waiting = list[tuple[int, int]](), [(ROOT, 0)]
    while waiting:
        candidate, depth = waiting.pop()
        order.append((candidate, depth))
        waiting += [(child, depth + 1) for child in reversed(children.get(candidate, []))]
    across: dict[int, int] = {}
    leaves = 0
    for candidate, _ in order:
        if not children.get(candidate):
            across[candidate] = _EDGE + leaves * _ACROSS
            leaves += 1
    for candidate, _ in reversed(order):
        if candidate not in across:
            own = [across[child] for child in children[candidate]]
            across[candidate] = (min(own) + max(own)) // 2
    return {candidate: (across[candidate], 32 + depth * _DOWN) for candidate, depth in order}


def _node(side: _Side, candidate: int, at: tuple[int, int]) -> Node:
    tree = side.tree
    number = tree.node.get(candidate)
    return Node(
        x=at[0],
        y=at[1],
        label="·" if number is None else str(number),
        token=str(tree.token.get(candidate, "?")),
        note=side.notes.get(candidate, ""),
        accepted=number in tree.accepted,
        selected=number is not None,
        wrong=candidate in side.wrong,
    )


def _words(title: str, nodes: tuple[Node, ...], shown: int) -> str:
    """The drawing in words."""
    each = []
    for node in nodes:
        marks = [word for word, on in (("accepted", node.accepted), ("differs", node.wrong)) if on]
        marks += [f"value {node.note}"] if node.note else []
        said = f" ({', '.join(marks)})" if marks else ""
        name = f"node {node.label}" if node.selected else "a candidate that was not selected"
        each.append(f"{name}: token {node.token}{said}")
    hidden = shown - (len(nodes) - 1)
    more = f"; {hidden} more are not drawn" if hidden else ""
    return f"{title}: {'; '.join(each)}{more}."
