"""Which drafts of a tree lie along a text, at every position of it.

A token of the text is accepted at depth j if it is a proposal of the node above it, which must have been expanded, and if it is
among the nodes that are verified. Each of the three is a cut in a ranking, and may be too close to tell.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from eagletwin.reference.everywhere import trees_everywhere
from eagletwin.reference.growth import Growth, View, candidates

from .draft import DraftModel
from .follow import EITHER, NO, YES, Followed, Shape


def follow_trees(
    draft: DraftModel, tokens: Sequence[int], hidden: Tensor, shape: Shape, tie: float, view: View = "slot_layout"
) -> Followed:
    """Trees behind every prefix of a text. hidden [>= n-1, ..]; tie as in follow_chains.

    view: whom a node attends to. SGLang's is `slot_layout` (DESIGN 3.4).
    """
    count, head = len(tokens), draft.heads[0]
    agrees, chosen = np.full((count, shape.num_steps), NO), np.full((count, shape.num_steps), NO)
    ids = torch.tensor(list(tokens), device=hidden.device)
    with torch.no_grad(), hidden.device:
        grown = trees_everywhere(head, ids, hidden.to(head.embedding.dtype), shape.topk, shape.num_steps, view)
        for first, growth in grown:
            for offset, tree in enumerate(_trees(growth, shape, tie, view)):
                said = tokens[first + offset + 1 : first + offset + 1 + shape.num_steps]
                agrees[first + offset, : len(said)], chosen[first + offset, : len(said)] = tree.along(said)
    return Followed(agrees, chosen)


class _Tree:
    """One tree, in plain numbers.

    logits     [R, V] of each row; proposed [R, k] its tokens, best first; scores [R*k] of all candidates
    expanded   [S-1, k] candidates: the frontier of each step
    close      two logits that differ by less are too close to tell; scores of depth j, sums of so many, by j times that
    verified   the cut between the nodes that are verified and the other candidates
    frontiers  [S-1] at each step, the cut between the candidates that are expanded and the others of their depth
    order      the first depth whose drafts depend on an order of the frontier that is too close to tell; num_steps: none does
    """

    def __init__(
        self, growth: Growth, number: int, tokens: Tensor, scores: Tensor, shape: Shape, tie: float, view: View
    ) -> None:
        self._shape, self._topk = shape, shape.topk
        self._logits = growth.logits[number]
        self._proposed, self._scores = tokens[number].tolist(), scores[number].flatten()
        self._expanded = growth.expanded[number].tolist()
        finite = torch.where(self._logits.isinf(), 0, self._logits)
        self._close = tie * float(finite.abs().max())
        count = min(shape.num_draft_tokens - 1, len(self._scores))
        self._verified = _Cut(self._scores, count)
        self._frontiers = [self._frontier(step) for step in range(shape.num_steps - 1)]
        self._order = self._unordered() if view == "slot_layout" else shape.num_steps

    def along(self, said: Sequence[int]) -> tuple[list[int], list[int]]:
        """(agrees, chosen) of a text's next tokens, by depth."""
        agrees: list[int] = []
        chosen: list[int] = []
        row = 0
        for depth, token in enumerate(said):
            if row < 0:  # the node above was not expanded, and it is too close to tell whether it should have been
                return _until_the_end(agrees, chosen, said, EITHER)
            proposal = self._proposal(row, token)
            if token not in self._proposed[row]:
                agrees.append(EITHER if proposal or depth >= self._order else NO)
                chosen.append(NO)
                return _until_the_end(agrees, chosen, said, agrees[-1])
            candidate = row * self._topk + self._proposed[row].index(token)
            here = self._verified.has(candidate)
            open_ = proposal or self._verified.close(candidate, self._close * (depth + 1)) or depth >= self._order
            agrees.append(EITHER if open_ else YES if here else NO)
            chosen.append(YES if here else NO)
            if agrees[-1] == NO:
                return _until_the_end(agrees, chosen, said, NO)
            if depth + 1 < len(said):
                row = self._row_of(candidate, depth)
                if row < 0 and not self._frontiers[depth].close(candidate, self._close * (depth + 1)):
                    return _until_the_end(agrees, chosen, said, NO)
        return agrees, chosen

    def _proposal(self, row: int, token: int) -> bool:
        """Whether it is too close to tell if a node proposes this token."""
        ranked = self._logits[row].topk(min(self._topk + 1, self._logits.shape[1])).values
        own, inside = self._logits[row, token], token in self._proposed[row]
        if inside:
            return len(ranked) > self._topk and bool(own - ranked[self._topk] <= self._close)
        return bool(ranked[self._topk - 1] - own <= self._close)

    def _row_of(self, candidate: int, depth: int) -> int:
        """The row that a candidate of this depth, from 0, was expanded into; -1: it was not."""
        frontier = self._expanded[depth]
        return 1 + depth * self._topk + frontier.index(candidate) if candidate in frontier else -1

    def _frontier(self, step: int) -> "_Cut":
        first, last = (0, self._topk) if step == 0 else (self._first(step), self._first(step + 1))
        return _Cut(self._scores[first:last], self._topk, first)

    def _first(self, step: int) -> int:
        """The first candidate of a depth, from 0."""
        return self._topk * (1 + (step - 1) * self._topk)

    def _unordered(self) -> int:
        for step, frontier in enumerate(self._frontiers[:-1] if self._topk > 1 else []):
            if frontier.near(self._close * (step + 1)):
                return step + 2  # rows of the next step read what stands under their number
        return self._shape.num_steps


def _until_the_end(agrees: list[int], chosen: list[int], said: Sequence[int], rest: int) -> tuple[list[int], list[int]]:
    """Both, as long as the text's next tokens: of the depths that are left, `rest` may agree, and none is chosen."""
    left = len(said) - len(agrees)
    return [*agrees, *[rest] * left], [*chosen, *[NO] * left]


class _Cut:
    """The `count` best of some candidates, the first of which has the number `first`."""

    def __init__(self, scores: Tensor, count: int, first: int = 0) -> None:
        self._scores, self._first = scores, first
        ranked = scores.sort(descending=True, stable=True)
        self._ranked, self._inside = ranked.values[: count + 1], set(ranked.indices[:count].tolist())
        self._count = count

    def has(self, candidate: int) -> bool:
        return candidate - self._first in self._inside

    def close(self, candidate: int, tie: float) -> bool:
        """Whether it is too close to tell on which side of the cut a candidate is."""
        own = self._scores[candidate - self._first]
        if not self.has(candidate):
            return bool(self._ranked[self._count - 1] - own <= tie)
        return len(self._ranked) > self._count and bool(own - self._ranked[self._count] <= tie)

    def near(self, tie: float) -> bool:
        """Whether the order of the best ones is too close to tell."""
        return bool((-self._ranked.diff() <= tie).any())


def _trees(growth: Growth, shape: Shape, tie: float, view: View) -> list[_Tree]:
    tokens, scores = candidates(growth.logits, growth.expanded, shape.topk)  # [C, R, k]
    return [_Tree(growth, number, tokens, scores, shape, tie, view) for number in range(len(tokens))]
