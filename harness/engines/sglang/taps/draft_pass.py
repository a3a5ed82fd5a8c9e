"""One draft(): what its steps chose, gathered while it runs."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.trace import snapshot

from .speculation import Speculation


@dataclass(slots=True)
class DraftPass:
    """Made when draft() begins, whole when it returns.

    decodes     forwards of draft decode that Python ran so far: j of the next is one more
    root        whether the first of them ran the bonus token before anything was proposed: that is step 0
    proposed    whether the root's children are known
    in_graph    whether all of them ran in a CUDA graph, and so none is seen
    expanded    [b, ..] parents of the nodes, without the root: the frontier of each step but the last
    selected    [b, D - 1] candidates that became nodes
    candidates  of each step: all tokens and their scores, [b, ..] each; of a tree only
    consumed    [b, (S - 1) * topk] tokens of the frontiers; of a tree in a graph only, where no forward shows them
    """

    decodes: int = 0
    root: bool = False
    proposed: bool = False
    in_graph: bool = False
    expanded: Array = field(default_factory=lambda: np.empty(0))
    selected: Array = field(default_factory=lambda: np.empty(0))
    candidates: list[tuple[Array, Array]] = field(default_factory=list)
    consumed: Array | None = None

    def begins(self) -> int:
        """A forward of draft decode begins: its step. A plain language model proposes d[1] from the row of the bonus token."""
        self.decodes += 1
        return self.decodes - self.root

    def ran(self, of: Speculation) -> int:
        """Forwards of draft decode: none for the last step's slots, unless the bonus token has the first ones', and none of
        several layers."""
        return 0 if of.layers or not of.steps else of.steps - 1 + self.root

    def step_selects(self, result: Any) -> None:
        """select_top_k_tokens returned this."""
        scores, tokens, _ = result[3]
        self.candidates.append((flat(snapshot(tokens)), flat(snapshot(scores))))

    def grown(self, result: Any) -> None:
        """draft_forward returned this, run by Python: (parents, selected, tokens). A parent is -1 for the root."""
        self.expanded, self.selected = snapshot(result[0])[:, 1:].astype(np.int64), snapshot(result[1])

    def replayed(self, result: Any) -> None:
        """The graph of draft decode returned the same three."""
        self.in_graph = True
        self.expanded, self.selected = snapshot(result[0])[:, 1:], snapshot(result[1])

    def tree_of(self, n: int, of: Speculation) -> dict[str, Array]:
        """What request n of the batch chose its nodes from; nothing of a chain, whose parts SGLang does not always fill in."""
        if of.topk == 1:
            return {}
        tensors = {"expanded": self.expanded[n], "selected": self.selected[n]}
        if self.candidates and not of.layers:
            tokens, scores = (np.concatenate([step[n] for step in steps]) for steps in zip(*self.candidates, strict=True))
            tensors |= {"candidate_tokens": tokens, "candidate_scores": scores}
        return tensors


def flat(array: Array) -> Array:
    """[n, ..] -> [n, all the rest]."""
    return array.reshape(len(array), -1)
