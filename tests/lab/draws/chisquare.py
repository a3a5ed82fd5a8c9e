"""Do counts agree with what was expected of them? Pearson's test, and its form for draws that differ from one to the next.

Both give a chance p: that counts as far off as these come from the right distribution. The chi-square distribution is what they
tend to for large expectations, so cells that expect less than LEAST are put together first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# The usual rule is 5, for chances of a few percent. With five cells of 40 to 400, of two million right sets of counts a share
# of 1.14e-3 had a chance below 1e-3, 1.3e-4 one below 1e-4, and 1.2e-5 one below 1e-5.
LEAST = 40.0


@dataclass(frozen=True, slots=True)
class Agreement:
    """statistic: 0 is perfect; freedom: its mean where all is right; chance: of one as large or larger, where all is right."""

    samples: int
    statistic: float
    freedom: int

    @property
    def chance(self) -> float:
        if self.freedom == 0:
            return 1.0
        half = torch.tensor([self.freedom / 2, self.statistic / 2], dtype=torch.float64)
        return float(torch.special.gammaincc(half[0], half[1]))


def pearson(counts: Tensor, chances: Tensor) -> Agreement:
    """Independent draws from one distribution. counts, chances [cells]; the chances sum to 1."""
    samples = int(counts.sum())
    observed, expected = pooled(counts.double(), chances.double() * samples)
    return Agreement(samples, float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1)


def pooled(counts: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """Both with the cells of small expectation put together, the smallest first, until each expects LEAST."""
    order = expected.argsort()
    counts, expected = counts[order], expected[order]
    together = int((expected.cumsum(0) < LEAST).sum()) + 1  # the fewest smallest that reach it
    if bool(expected[0] >= LEAST) or together >= len(expected):
        return (counts, expected) if bool(expected[0] >= LEAST) else (counts.sum()[None], expected.sum()[None])
    head_counts, head_expected = counts[:together].sum()[None], expected[:together].sum()[None]
    rest_counts, rest_expected = counts[together:], expected[together:]
    small = rest_expected < LEAST
    head_counts, head_expected = head_counts + rest_counts[small].sum(), head_expected + rest_expected[small].sum()
    return torch.cat([head_counts, rest_counts[~small]]), torch.cat([head_expected, rest_expected[~small]])


def as_one(parts: Sequence[Agreement]) -> Agreement:
    """Independent counts as one: a fault that is small in each of them adds up."""
    return Agreement(
        sum(part.samples for part in parts), sum(part.statistic for part in parts), sum(part.freedom for part in parts)
    )


class Drifting:
    """Draws from distributions [cells] that are different each time, and known before each draw: a token after its prefix.

    The sum of (what was drawn) - (what was expected) has a covariance that is the sum of theirs, and tends to a normal
    distribution; its square, by that covariance, is the statistic.
    """

    def __init__(self, cells: int) -> None:
        self.samples = 0
        self.excess = torch.zeros(cells, dtype=torch.float64)
        self.expected = torch.zeros(cells, dtype=torch.float64)
        self.covariance = torch.zeros(cells, cells, dtype=torch.float64)

    def add(self, drawn: Sequence[int], chances: Tensor) -> None:
        """drawn: the cell of each draw; chances [draws, cells]."""
        self.samples += len(drawn)
        self.excess += torch.bincount(torch.tensor(drawn), minlength=len(self.excess)) - chances.sum(0)
        self.expected += chances.sum(0)
        self.covariance += torch.diag(chances.sum(0)) - chances.T @ chances

    def merge(self, other: "Drifting") -> None:
        self.samples += other.samples
        self.excess += other.excess
        self.expected += other.expected
        self.covariance += other.covariance

    def agreement(self) -> Agreement:
        """The last cell follows from the others. Those that expect less than LEAST are put together with it."""
        kept = (self.expected >= LEAST).nonzero().flatten()
        kept = kept[:-1] if len(kept) == len(self.expected) else kept
        if not len(kept):
            return Agreement(self.samples, 0.0, 0)
        excess, covariance = self.excess[kept], self.covariance[kept][:, kept]
        statistic = float(excess @ torch.linalg.solve(covariance, excess))
        return Agreement(self.samples, statistic, len(kept))
