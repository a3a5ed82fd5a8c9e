"""Which drafts of a tree lie along a text, at every position of it.

A token of the text is accepted at depth j if it is a proposal of the node above it, which must have been expanded, and if it is
among the nodes that are verified. Each of the three is a cut in a ranking, and may be too close to tell.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from eagletwin.harness.core.arrays import Array
from eagletwin.reference.everywhere import trees_everywhere
from eagletwin.reference.growth import Growth, View, candidates

from .device import on
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
    with torch.no_grad(), on(hidden.device):
        ahead = torch.arange(1, shape.num_steps + 1)  # [S]
        grown = trees_everywhere(head, ids, hidden.to(head.embedding.dtype), shape.topk, shape.num_steps, view)
        for first, growth in grown:
            places = torch.arange(first, first + len(growth.logits))[:, None] + ahead  # [C, S]
            trees = _Trees(growth, ids[places.clamp(max=count - 1)], shape, tie, view)
            for number in range(len(places)):
                said = tokens[first + number + 1 : first + number + 1 + shape.num_steps]
                agrees[first + number, : len(said)], chosen[first + number, : len(said)] = trees.along(number, said)
    return Followed(agrees, chosen)


class _Trees:
    """C trees of a block, in plain numbers: all rankings are made at once, and a text then needs few of them.

    proposed   [C, R, k] tokens of each row, best first
    edge       [C, R, ..] the logits on both sides of the cut behind the last of them; one, where no token is left behind it
    own        [C, R, S] the logit, in each row, of the text's token of each depth
    expanded   [C, S-1, k] candidates: the frontier of each step
    close      [C] two logits that differ by less are too close to tell; scores of depth j, sums of so many, by j times that
    verified   the cut between the nodes that are verified and the other candidates
    frontiers  [S-1] at each step, the cut between the candidates that are expanded and the others of their depth
    order      [C] the first depth whose drafts depend on an order of the frontier that is too close to tell; S: none does
    """

    def __init__(self, growth: Growth, said: Tensor, shape: Shape, tie: float, view: View) -> None:
        """said [C, S]: the text's next tokens behind each root; where the text has ended, any."""
        self._topk, logits = shape.topk, growth.logits
        proposed, scores = candidates(logits, growth.expanded, shape.topk)  # [C, R, k]
        self._proposed, self._expanded = proposed.tolist(), growth.expanded.tolist()
        self._edge = _numbers(logits.topk(min(shape.topk + 1, logits.shape[-1])).values[..., shape.topk - 1 :])
        self._own = _numbers(logits.gather(2, said[:, None].expand(-1, logits.shape[1], -1)))
        self._close = tie * _numbers(torch.where(logits.isinf(), 0, logits).abs().amax((1, 2)))
        flat = scores.flatten(1)  # [C, R*k]
        self._verified = _Cut(flat, min(shape.num_draft_tokens - 1, flat.shape[1]))
        self._frontiers = [self._frontier(flat, step) for step in range(shape.num_steps - 1)]
        self._order = np.full(len(flat), shape.num_steps)
        if view == "slot_layout" and shape.topk > 1:
            for step in reversed(range(shape.num_steps - 2)):
                # rows of the next step read what stands under their number
                self._order[self._frontiers[step].near(self._close * (step + 1))] = step + 2

    def along(self, number: int, said: Sequence[int]) -> tuple[list[int], list[int]]:
        """(agrees, chosen) of a text's next tokens in one tree, by depth."""
        agrees: list[int] = []
        chosen: list[int] = []
        row = 0
        for depth, token in enumerate(said):
            if row < 0:  # the node above was not expanded, and it is too close to tell whether it should have been
                return _until_the_end(agrees, chosen, said, EITHER)
            proposed, tie = self._proposed[number][row], self._close[number] * (depth + 1)
            open_ = self._proposal(number, row, depth, token in proposed) or bool(depth >= self._order[number])
            if token not in proposed:
                agrees.append(EITHER if open_ else NO)
                chosen.append(NO)
                return _until_the_end(agrees, chosen, said, agrees[-1])
            candidate = row * self._topk + proposed.index(token)
            here = self._verified.has(number, candidate)
            open_ = open_ or self._verified.close(number, candidate, tie)
            agrees.append(EITHER if open_ else YES if here else NO)
            chosen.append(YES if here else NO)
            if agrees[-1] == NO:
                return _until_the_end(agrees, chosen, said, NO)
            if depth + 1 < len(said):
                row = self._row_of(number, candidate, depth)
                if row < 0 and not self._frontiers[depth].close(number, candidate, tie):
                    return _until_the_end(agrees, chosen, said, NO)
        return agrees, chosen

    def _proposal(self, number: int, row: int, depth: int, inside: bool) -> bool:
        """Whether it is too close to tell if a node proposes the text's token; inside: the reference does."""
        own, edge = self._own[number, row, depth], self._edge[number, row]
        if inside:
            return len(edge) > 1 and bool(own - edge[1] <= self._close[number])
        return bool(edge[0] - own <= self._close[number])

    def _row_of(self, number: int, candidate: int, depth: int) -> int:
        """The row that a candidate of this depth, from 0, was expanded into; -1: it was not."""
        frontier = self._expanded[number][depth]
        return 1 + depth * self._topk + frontier.index(candidate) if candidate in frontier else -1

    def _frontier(self, scores: Tensor, step: int) -> "_Cut":
        first, last = (0, self._topk) if step == 0 else (self._first(step), self._first(step + 1))
        return _Cut(scores[:, first:last], self._topk, first)

    def _first(self, step: int) -> int:
        """The first candidate of a depth, from 0."""
        return self._topk * (1 + (step - 1) * self._topk)


def _until_the_end(agrees: list[int], chosen: list[int], said: Sequence[int], rest: int) -> tuple[list[int], list[int]]:
    """Both, as long as the text's next tokens: of the depths that are left, `rest` may agree, and none is chosen."""
    left = len(said) - len(agrees)
    return [*agrees, *[rest] * left], [*chosen, *[NO] * left]


class _Cut:
    """Of each of C trees, the `count` best of some candidates, the first of which has the number `first`. scores [C, N]."""

    def __init__(self, scores: Tensor, count: int, first: int = 0) -> None:
        self._scores, self._first, self._count = _numbers(scores), first, count
        ranked = scores.sort(descending=True, stable=True)
        self._ranked, self._inside = _numbers(ranked.values[:, : count + 1]), ranked.indices[:, :count].tolist()

    def has(self, number: int, candidate: int) -> bool:
        return candidate - self._first in self._inside[number]

    def close(self, number: int, candidate: int, tie: float) -> bool:
        """Whether it is too close to tell on which side of the cut a candidate is."""
        own, ranked = self._scores[number, candidate - self._first], self._ranked[number]
        if not self.has(number, candidate):
            return bool(ranked[self._count - 1] - own <= tie)
        return len(ranked) > self._count and bool(own - ranked[self._count] <= tie)

    def near(self, tie: Array) -> Array:
        """[C] whether the order of the best ones is too close to tell. tie [C]."""
        gaps = -np.diff(self._ranked)  # of neighbours in rank
        close: Array = gaps.min(1, initial=np.inf) <= tie
        return close


def _numbers(tensor: Tensor) -> Array:
    found: Array = tensor.cpu().numpy()
    return found
