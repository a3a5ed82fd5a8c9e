"""What the reference can tell of a tree's choices: which candidates should have been expanded and selected, and how surely.

Computed for many rounds at once; trees.py reports. A candidate's score is a sum of log-probabilities along its path, and each
of them may be off by what the bound allows its row's logits. What two paths share cancels out of their difference.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eagletwin.harness.case import Case
from eagletwin.reference.growth import Growth, candidates, path_sums

from .bounds import Bounds, magnitude

# A product of probabilities below float32's smallest normal number (e**-87.3) has lost its digits: such scores are all equal.
SMALLEST = -87.0


def logs(probabilities: Tensor) -> Tensor:
    """Logarithms, down to that of float32's smallest normal number. A NaN stays one."""
    found = probabilities.double().log()
    return torch.where(found < SMALLEST, SMALLEST, found)


@dataclass(slots=True)
class Ranked:
    """A choice of the n best candidates that the engine made, position by position.

    expected, actual   candidates [n] (as a set, in the order of their numbers, for the final selection)
    wrong   positions where the engine's score is surely too small
    adopted positions where it is another candidate than the reference's, and the reference cannot tell them apart
    ties    positions where it could not have told the next best from this one; unsure_at_the_edge: 1 if the last of them
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
    scores: Tensor
    sizes: Tensor


def choices(case: Case, growth: Growth, selected: list[list[int]], bounds: Bounds) -> list[Choices]:
    """Of C rounds: growth with C in front, selected [C][D-1] as the engine selected. Of a chain there is nothing to tell."""
    count, topk = len(selected), case.topk
    if topk == 1:
        nothing = torch.empty(0)
        return [Choices([], [], None, nothing, nothing) for _ in selected]
    tokens, scores = candidates(growth.logits, growth.expanded, topk)
    scores = scores.flatten(1).clamp(min=SMALLEST)  # [C, N]
    # each log-probability on the path is a difference of two numbers that are each off by the bound
    sizes = path_sums((2 * magnitude(growth.logits))[..., None].expand(-1, -1, topk), growth.expanded, topk).flatten(1)
    errors = _Errors(growth, topk, bounds)
    of_steps = []
    for step in range(1, growth.expanded.shape[1]):
        first = topk + (step - 1) * topk * topk
        of_steps.append(_ranked(scores, errors, slice(first, first + topk * topk), growth.expanded[:, step]))
    total = scores.shape[1]
    nodes = torch.tensor([[n if 0 <= n < total else 0 for n in row] for row in selected], dtype=torch.int64)
    by_score = nodes.gather(1, scores.gather(1, nodes).sort(dim=1, descending=True, stable=True).indices)
    final = _ranked(scores, errors, slice(0, total), by_score)
    for ranked in final:  # a set: what matters is the edge between the last that is in it and the first that is not
        ranked.ties = ranked.unsure_at_the_edge
    return [
        Choices(row, [step[n] for step in of_steps], final[n], scores[n], sizes[n])
        for n, row in zip(range(count), tokens.flatten(1).tolist(), strict=True)
    ]


class _Errors:
    """How far the difference of two candidates' scores may be off."""

    def __init__(self, growth: Growth, topk: int, bounds: Bounds) -> None:
        count, steps, _ = growth.expanded.shape
        self._topk = topk
        self._of_row = bounds.tie * magnitude(
            growth.logits
        )  # [C, R] of one log-probability, or of the difference of two logits
        # candidates on the way from the root to each, itself the last; -1 where the path is shorter
        paths = torch.full((count, topk, steps + 1), -1)
        paths[:, :, 0] = torch.arange(topk)
        for step in range(steps):
            parents = paths.gather(1, growth.expanded[:, step, :, None].expand(-1, -1, steps + 1))  # [C, k, S]
            children = parents.repeat_interleave(topk, 1)  # [C, k*k, S]
            children[:, :, step + 1] = paths.shape[1] + torch.arange(topk * topk)
            paths = torch.cat([paths, children], 1)
        self._paths = paths  # [C, N, S]

    def between(self, first: Tensor, second: Tensor) -> Tensor:
        """first, second: candidates [C, n] -> [C, n]."""
        steps = self._paths.shape[2]
        one, other = (self._paths.gather(1, which[..., None].expand(-1, -1, steps)) for which in (first, second))
        rows = [(path.clamp(min=0) // self._topk).flatten(1) for path in (one, other)]
        sizes = [self._of_row.gather(1, row).view_as(one) * (path >= 0) for row, path in zip(rows, (one, other), strict=True)]
        siblings = (rows[0] == rows[1]).view_as(one) & (one >= 0) & (other >= 0)
        apart = torch.where(siblings, sizes[0], sizes[0] + sizes[1])
        return (apart * (one != other)).sum(-1)


def _ranked(scores: Tensor, errors: _Errors, among: slice, actual: Tensor) -> list[Ranked]:
    """The best of the candidates `among` [C, ..]; actual [C, n]: the engine's, in its order."""
    count = actual.shape[1]
    best = scores[:, among].topk(min(count + 1, among.stop - among.start), 1)
    found, values = best.indices + among.start, best.values  # [C, n(+1)]
    unsure = values[:, :-1] - values[:, 1:] <= errors.between(found[:, :-1], found[:, 1:])  # [C, n] between neighbours
    expected = found[:, :count]
    ties = torch.zeros_like(expected, dtype=torch.bool)
    ties[:, : unsure.shape[1]] = unsure[:, :count]
    ties[:, 1:] |= unsure[:, : count - 1]
    wrong = (values[:, :count] - scores.gather(1, actual)).abs() > errors.between(expected, actual)
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
        Ranked(must, has, [n for n, bad in enumerate(flags) if bad], adopted, tied, edge)
        for must, has, flags, adopted, tied, edge in rows
    ]
