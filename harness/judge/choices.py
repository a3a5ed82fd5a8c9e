"""What the reference can tell of a tree's choices: which candidates should have been expanded and selected, and how surely.

Computed for many rounds at once; trees.py reports. A candidate's score is a sum of log-probabilities along its path, and each
of them may be off by what the bound allows its row's logits. What two paths share cancels out of their difference.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.case import Case
from eagletwin.reference.growth import Growth, candidates

from .bounds import SMALLEST_LOG, Bounds, magnitude


@dataclass(slots=True)
class Ranked:
    """A choice of the n best candidates that the engine made, position by position.

    expected, actual   candidates [n] (as a set, in the order of their numbers, for the final selection)
    wrong   positions where the engine's score is surely too small
    adopted positions where it is another candidate than the reference's, and the reference cannot tell them apart
    ties    positions where the next best candidate scores as well within the bound; unsure_at_the_edge: 1 if the last of them
    """

    expected: list[int]
    actual: list[int]
    wrong: list[int]
    adopted: int
    ties: int
    unsure_at_the_edge: int


@dataclass(slots=True)
class Choices:
    """Of one round. N candidates.

    tokens    [N] of the candidates, as the reference ranks them
    frontiers of steps 2..S-1; step 1 expands all of the root's candidates in their order
    selected  the final selection, best first
    scores    [N]; sizes [N]: magnitude of the logits that each was computed from, for the bound of a score
    """

    tokens: list[int]
    frontiers: list[Ranked]
    selected: Ranked | None
    scores: Array
    sizes: Array


def choices(case: Case, growth: Growth, selected: list[list[int]], bounds: Bounds) -> list[Choices]:
    """Of C rounds: growth with C in front, selected [C][D-1] as the engine selected. A chain has no such choices."""
    count, topk = len(selected), case.topk
    if topk == 1:
        nothing = np.empty(0)
        return [Choices([], [], None, nothing, nothing) for _ in selected]
    ranked_tokens, sums = candidates(growth.logits, growth.expanded, topk)
    scores = np.maximum(sums.flatten(1).numpy(), SMALLEST_LOG)  # [C, N]
    size, expanded = magnitude(growth.logits.numpy()), growth.expanded.numpy()  # [C, R], [C, S-1, k]
    total = scores.shape[1]
    selections = []
    for step in range(1, expanded.shape[1]):
        first = topk + (step - 1) * topk * topk
        selections.append((slice(first, first + topk * topk), expanded[:, step]))
    nodes = np.array([[n if 0 <= n < total else 0 for n in row] for row in selected], np.int64)
    by_score = np.argsort(-np.take_along_axis(scores, nodes, 1), axis=1, kind="stable")
    selections.append((slice(0, total), np.take_along_axis(nodes, by_score, 1)))
    errors = _Errors(expanded, size, bounds)
    *of_steps, final = _rank_choices(scores, errors, selections)
    for ranked in final:  # a set: what matters is the edge between the last that is in it and the first that is not
        ranked.ties = ranked.unsure_at_the_edge
    return [
        Choices(row, [step[n] for step in of_steps], final[n], scores[n], errors.sizes[n])
        for n, row in zip(range(count), ranked_tokens.flatten(1).tolist(), strict=True)
    ]


class _Errors:
    """How far the difference of two candidates' scores may be off.

    expanded [C, S-1, k]; size [C, R]: magnitude of each row's logits
    sizes [C, N]: of the numbers that a candidate's score is a sum of; each log-probability on its path is a difference of two,
    which are each off by the bound
    """

    def __init__(self, expanded: Array, size: Array, bounds: Bounds) -> None:
        count, steps, topk = expanded.shape
        self._rounds, children = np.arange(count)[:, None], np.arange(topk * topk)
        # candidates on the way from the root to each, itself the last; -1 where the path is shorter
        paths = np.full((count, topk + steps * topk * topk, steps + 1), -1)
        paths[:, :topk, 0] = children[:topk]
        for step in range(steps):
            own = topk + step * topk * topk + children
            paths[:, own] = paths[self._rounds, expanded[:, step]].repeat(topk, 1)
            paths[:, own, step + 1] = own
        self._paths = paths  # [C, N, S]
        self._proposers = np.where(paths < 0, -1, paths // topk)  # rows
        sizes = np.where(paths < 0, 0, size[self._rounds[..., None], self._proposers])
        self._errors = bounds.tie * sizes  # of one log-probability, or of the difference of two logits
        self.sizes = 2 * sizes.sum(-1)

    def between(self, first: Array, second: Array) -> Array:
        """first, second: candidates [C, n] -> [C, n]."""
        one, other = (self._rounds, first), (self._rounds, second)
        siblings = (self._proposers[one] == self._proposers[other]) & (self._proposers[one] >= 0)
        apart = self._errors[one] + np.where(siblings, 0, self._errors[other])
        error: Array = np.where(self._paths[one] != self._paths[other], apart, 0).sum(-1)
        return error


def _rank_choices(scores: Array, errors: _Errors, selections: Sequence[tuple[slice, Array]]) -> list[list[Ranked]]:
    """Several choices, each by round: among which candidates, and the engine's best of them [C, n], in its order."""
    best = []
    for among, actual in selections:
        wanted = min(actual.shape[1] + 1, among.stop - among.start)
        values, places = torch.from_numpy(scores[:, among]).topk(wanted, 1)
        best.append((values.numpy(), places.numpy() + among.start))  # [C, n(+1)]
    # between neighbours, then between what is expected and what there is: all of it at once
    pairs = [(leaders[:, :-1], leaders[:, 1:]) for _, leaders in best]
    pairs += [(leaders[:, : actual.shape[1]], actual) for (_, leaders), (_, actual) in zip(best, selections, strict=True)]
    firsts, seconds = (np.concatenate(side, 1) for side in zip(*pairs, strict=True))
    ends = np.cumsum([one.shape[1] for one, _ in pairs])
    apart = np.split(errors.between(firsts, seconds), ends[:-1], 1)
    count = len(selections)
    return [
        _judge_choice(scores, actual, *leaders, near, far)
        for (_, actual), leaders, near, far in zip(selections, best, apart[:count], apart[count:], strict=True)
    ]


def _judge_choice(scores: Array, actual: Array, values: Array, leaders: Array, near: Array, far: Array) -> list[Ranked]:
    """One choice, by round. actual [C, n]; values and leaders: the best scores and whose they are [C, n(+1)]; how far the
    difference of two neighbours among them may be off: near, and that of what is expected and actual: far."""
    count = actual.shape[1]
    expected, unsure = leaders[:, :count], values[:, :-1] - values[:, 1:] <= near  # [C, n] each
    ties = np.zeros(expected.shape, bool)
    ties[:, : unsure.shape[1]] = unsure[:, :count]
    ties[:, 1:] |= unsure[:, : count - 1]
    wrong = np.abs(values[:, :count] - np.take_along_axis(scores, actual, 1)) > far
    rows = zip(
        expected.tolist(),
        actual.tolist(),
        wrong.tolist(),
        ((expected != actual) & ~wrong).sum(1).tolist(),
        ties.sum(1).tolist(),
        unsure[:, count - 1 : count].sum(1).tolist(),
        strict=True,
    )
    return [
        Ranked(best, chosen, [n for n, bad in enumerate(flags) if bad], adopted, tied, edge)
        for best, chosen, flags, adopted, tied, edge in rows
    ]
