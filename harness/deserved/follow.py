"""At each position of a text: how many of the drafts that a correct engine makes there are in the text.

With x[0..M] committed, a draft of depth j is accepted if all above it were and it is x[M+j]. Under greedy decoding, and where
the target alone accepts a sampled token, the text says all: no draft has to be sampled again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eagletwin.harness.core.arrays import Array
from eagletwin.reference.everywhere import chains_everywhere, layers_everywhere

from .device import on
from .draft import DraftModel

NO, YES, EITHER = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Shape:
    """What is drafted in a round. num_draft_tokens counts the root; a chain has num_steps + 1."""

    num_steps: int
    topk: int = 1
    num_draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Followed:
    """What is accepted behind each prefix x[0..M] of a text x[0..n-1]: row M, for M = 0..n-1. Row 0 means nothing.

    agrees  [n, S] whether the draft of depth j+1 is x[M+j+1], given that those above it are right: NO, YES, or EITHER, where
            the head's choice is too close to tell at the engine's precision. NO where the text has ended
    chosen  [n, S] the same without EITHER: as the reference chooses
    """

    agrees: Array
    chosen: Array

    def accepted(self, committed: int) -> int:
        """a(M): drafts accepted behind x[0..M], as the reference chooses."""
        return int(_in_a_row(self.chosen[committed]))

    @property
    def accepted_everywhere(self) -> Array:
        """[n] a(M) of every M."""
        return _in_a_row(self.chosen)

    def possible(self, committed: int) -> list[int]:
        """All that a(M) may be, as near ties go; in rising order."""
        found = []
        for depth, agrees in enumerate(self.agrees[committed]):
            if agrees != YES:
                found.append(depth)
            if agrees == NO:
                return found
        return [*found, self.agrees.shape[1]]

    @property
    def doubtful(self) -> Array:
        """[n] whether a near tie leaves open how many drafts are accepted."""
        return np.array([len(self.possible(committed)) > 1 for committed in range(len(self.agrees))])


def _in_a_row(chosen: Array) -> Array:
    """Drafts that are accepted before the first that is not. chosen [.., S] -> [..]."""
    accepted: Array = (chosen != NO).cumprod(-1).sum(-1)
    return accepted


def follow_chains(draft: DraftModel, tokens: Sequence[int], hidden: Tensor, num_steps: int, tie: float) -> Followed:
    """Chains behind every prefix of a text. hidden [>= n-1, ..]: what the target hands over.

    tie: two logits that differ by less, as a share of the largest of their row, are too close to tell.
    """
    count = len(tokens)
    ids = torch.tensor(list(tokens), device=hidden.device)
    agrees, chosen = np.full((count, num_steps), NO), np.full((count, num_steps), NO)
    for first, logits in chain_logits(draft, ids, hidden.to(draft.heads[0].embedding.dtype), num_steps):
        for step in range(num_steps):
            known = range(first, min(first + len(logits), count - 1 - step))  # M with M + step + 1 < n
            if known:
                rows = slice(known.start, known.stop)
                said = ids[known.start + step + 1 : known.stop + step + 1]
                agrees[rows, step], chosen[rows, step] = agreement(logits[: len(known), step], said, tie)
    return Followed(agrees, chosen)


def chain_logits(draft: DraftModel, tokens: Tensor, hidden: Tensor, num_steps: int) -> Iterator[tuple[int, Tensor]]:
    """Blocks of (first, logits [C, S, V]): what each draft behind x[0..M], M = first + c, is chosen from; its vocabulary is the
    target's. tokens [n]; hidden [>= n-1, ..] in the head's type."""
    with torch.no_grad(), on(tokens.device):
        if draft.algorithm == "MTP":
            yield from layers_everywhere(draft.heads[:num_steps], draft.chained, tokens, hidden)
        else:
            yield from chains_everywhere(draft.heads[0], tokens, hidden, num_steps)


def agreement(logits: Tensor, said: Tensor, tie: float) -> tuple[Array, Array]:
    """Of choices from logits [C, V]: whether each is the token that was said [C]; and the same without EITHER."""
    best = logits.topk(2)  # a vocabulary has two tokens
    size = torch.where(logits.isinf(), 0, logits).abs().amax(-1)
    own = logits.gather(1, said[:, None])[:, 0]
    is_best = best.indices[:, 0] == said
    lead = torch.where(is_best, best.values[:, 0] - best.values[:, 1], best.values[:, 0] - own)
    close = lead <= tie * size  # -inf, of a token that cannot be proposed, is never close
    agrees = torch.where(close, EITHER, torch.where(is_best, YES, NO))
    return agrees.cpu().numpy(), torch.where(is_best, YES, NO).cpu().numpy()
