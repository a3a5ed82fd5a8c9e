"""The draft tree of a divergence as text, with the nodes that it is about marked. Called by argument.py.

docs/explanation/trees.md shows how to read it.
"""

from collections.abc import Iterator

from eagletwin.harness.core.terminal import count
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.core.verdict import Divergence
from eagletwin.harness.judge.trees import ROOT, DraftTree, tree_of

# A tree of more nodes is cut down to what is marked or accepted, the way there, and its siblings.
MOST_LINES = 40


def draw(trace: Trace, found: Divergence) -> list[str]:
    """Lines of the tree that a divergence is about; none where it is about none."""
    tree = tree_of(trace, found)
    if tree is None:
        return []
    behind = f"{count(len(tree.node) - 1, 'node')} behind the bonus token at position {tree.committed}"
    head = f"The tree of request {found.request}, round {found.round}: {behind}."
    return [head, "", *_lines(tree)]


def _lines(tree: DraftTree) -> Iterator[str]:
    shown = {candidate for known in (tree.node, tree.expanded, tree.marks) for candidate in known if candidate != ROOT}
    for candidate in list(shown):
        shown.update(tree.way_to(candidate))
    hidden = 0
    if len(shown) > MOST_LINES:
        ends = {*tree.marks, *(candidate for candidate, node in tree.node.items() if node in tree.accepted)} - {ROOT}
        kept = {candidate for end in ends for candidate in tree.way_to(end)}
        parents = {ROOT, *(tree.parent(candidate) for candidate in kept)}
        kept |= {candidate for candidate in shown if tree.parent(candidate) in parents}
        hidden, shown = len(shown) - len(kept), kept
    children: dict[int, list[int]] = {}
    for candidate in sorted(shown):
        children.setdefault(tree.parent(candidate), []).append(candidate)
    rows = [("", ROOT)]
    waiting = [("", candidate) for candidate in reversed(children.get(ROOT, []))]
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


def _origin(tree: DraftTree, candidate: int) -> str:
    if candidate == ROOT:
        return "root"
    at = tree.expanded.index(candidate) if candidate in tree.expanded else -1
    branch = f", step {at // tree.topk + 1} branch {at % tree.topk}" if at >= 0 else ""
    return f"candidate {candidate}{branch}"
