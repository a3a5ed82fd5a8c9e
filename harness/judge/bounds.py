"""When two floats are the same number, and when a choice between two logits is nobody's to make.

The reference computes in float64, the engine in another type: what it computes in says how far off it may be. One bound serves
all rows of an engine; it scales with the row's magnitude.
"""

import torch
from msgspec import Struct
from torch import Tensor

from eagletwin.harness.dtype import Dtype


class Bounds(Struct, frozen=True, kw_only=True):
    """Of an engine that computes in one type.

    relative  how far off a number may be, as a share of the largest magnitude of its row
    adopted_share, tie_share  a case says little about the engine, and is unknown, if in more than the first share of the
              choices the engine's was adopted, or if more than the second share could not have been told from another; one of
              each is always allowed
    """

    relative: float
    adopted_share: float
    tie_share: float

    @property
    def tie(self) -> float:
        """A comparison of two logits, each of which may be off by the bound."""
        return 2 * self.relative

    def error_of(self, expected: Tensor, actual: Tensor, scale: Tensor | None = None) -> Tensor:
        """Largest error of each row as a share of the bound. expected, actual [R, ..] -> [R]; not finite counts as infinite.

        scale [R]: magnitude of the numbers that the row was computed from, where it is not the row's own.
        """
        expected, actual = expected.flatten(1), actual.double().flatten(1)
        size = (expected.abs().amax(1) if scale is None else scale).clamp(min=1e-30)
        share = (actual - expected).abs().amax(1) / (self.relative * size)
        return torch.where(actual.isfinite().all(1), share, torch.full_like(share, torch.inf))

    def undecided(self, logits: Tensor, first: int, second: int) -> bool:
        """Whether the reference cannot tell which of two tokens has the larger logit. logits [V]."""
        return bool((logits[first] - logits[second]).abs() <= self.tie * magnitude(logits))

    def ties(self, logits: Tensor, ranks: int) -> Tensor:
        """Whether each of the `ranks` largest logits is closer to a neighbour than the bound. logits [.., V] -> [.., ranks]."""
        best = logits.topk(min(ranks + 1, logits.shape[-1])).values
        near = best[..., :-1] - best[..., 1:] <= (self.tie * magnitude(logits))[..., None]
        tied = torch.zeros(*near.shape[:-1], ranks, dtype=torch.bool)
        tied[..., : near.shape[-1]] = near
        tied[..., 1:] |= near[..., : ranks - 1]
        return tied


def magnitude(logits: Tensor) -> Tensor:
    """Largest finite size of a row of logits [.., V] -> [..]. A token that cannot be proposed has -inf."""
    return logits.abs().masked_fill(logits.isinf(), 0).amax(-1)


# float32 rounds at 6e-8. A stored number is the end of some 8 dependent sums a layer, over up to 5 layers and the rows of a
# chain, each of some 100 terms: errors that add up without luck come to 100 * 40 * 6e-8 = 2.4e-4 for one row, and in practice,
# where they are random, to 1e-6 in cases of up to 60 positions. The angles of a float32 rotary embedding lose a bit with each
# doubling of the position: at 600 positions a twelfth of the bound was seen used, at 2,000 a third (docs/figures.md). A fault
# moves a row by its own magnitude: a wrong token, position or hidden state by 1e-2 to 1.
#
# The second share is wider than the first: a choice that the engine made as the reference does is adopted from nobody, and two
# in a case of thirty occur by chance.
FLOAT32 = Bounds(relative=1e-4, adopted_share=0.05, tie_share=0.25)

BOUNDS: dict[Dtype, Bounds] = {"float32": FLOAT32}
