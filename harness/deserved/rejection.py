"""What rejection sampling deserves along a text: an expectation, and whether a server's rounds are within chance of it.

The draft draws d from q, and verify keeps it with probability min(1, p(d) / q(d)); where it does not, a token is drawn from
what p has more of than q. So the next token is x with probability p(x) in all, and with probability min(p(x), q(x)) as a draft
that was kept (Leviathan et al. 2023, Chen et al. 2023). Of a text that came back, the draft of its next token was therefore
kept with probability min(1, q(x) / p(x)), whatever was drawn before it: the rounds of a text are a walk with known chances.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eagletwin.harness.core.arrays import Array

from .draft import DraftModel
from .follow import chain_logits

# Of servers that are right, one in 16,000 is further off than this by chance.
MOST_DEVIATIONS = 4.0
_SHOWN = 1.645  # deviations above which 95 of 100 lie


@dataclass(frozen=True, slots=True)
class Expected:
    """Rounds of texts: their expectation, and the variance of their sum. Texts are independent, given what they say."""

    rounds: float
    variance: float

    def __add__(self, other: "Expected") -> "Expected":
        return Expected(self.rounds + other.rounds, self.variance + other.variance)

    @property
    def smallest_loss(self) -> float:
        """Rounds by which a server must be off for 95 of 100 runs to show it."""
        return float((MOST_DEVIATIONS + _SHOWN) * self.variance**0.5)

    def deviations(self, used: int) -> float:
        """How many standard deviations a number of rounds is off; 0 where nothing is left to chance and none is."""
        off = used - self.rounds
        return off / max(self.variance, 1e-12) ** 0.5 if abs(off) > 1e-6 else 0.0


def chances(
    draft: DraftModel, tokens: Sequence[int], hidden: Tensor, said: Tensor, num_steps: int, temperature: float
) -> Array:
    """[n, S] the probability that the draft of depth j+1 behind x[0..M] was kept, given the text and that those above it were.

    said [n-1]: log p(x[i+1]) of the target, at this temperature and without cuts. 0 where the text has ended.
    """
    count, ids = len(tokens), torch.tensor(list(tokens), device=hidden.device)
    kept = np.zeros((count, num_steps))
    for first, logits in chain_logits(draft, ids, hidden.to(draft.heads[0].embedding.dtype), num_steps):
        for step in range(num_steps):
            known = range(first, min(first + len(logits), count - 1 - step))
            if known:
                rows = slice(known.start, known.stop)
                following = ids[known.start + step + 1 : known.stop + step + 1]
                drawn = (logits[: len(known), step] / temperature).log_softmax(-1)
                of_draft = drawn.gather(1, following[:, None])[:, 0]
                of_target = said[known.start + step : known.stop + step].to(of_draft)
                kept[rows, step] = (of_draft - of_target).exp().clamp(max=1).cpu().numpy()
    return kept


def expected(kept: Array, begin: int) -> Expected:
    """The rounds of a text whose token x[begin] was the first that was emitted. kept [n, S]: of `chances`."""
    last = len(kept) - 1
    mean, square = np.zeros(last + 1), np.zeros(last + 1)  # of the rounds from each M on
    for place in range(last - 1, begin - 1, -1):
        above = 1.0
        for drafts in range(kept.shape[1] + 1):
            stops = 1.0 if drafts == kept.shape[1] else 1 - float(kept[place, drafts])
            end = min(place + drafts + 1, last)
            chance = above * stops
            mean[place] += chance * (1 + mean[end])
            square[place] += chance * (1 + 2 * mean[end] + square[end])
            above *= 1 - stops
    return Expected(float(mean[begin]), max(0.0, float(square[begin] - mean[begin] ** 2)))
