"""The rounds of a draft of several layers whose provisional rows stay, as in SGLang's layout (DESIGN 3.7, `last_fed`).

A row of layer k that was written before its token was committed holds the draft of it. Where verification refused that draft,
the row stays wrong. So what is proposed depends on the rounds before, and a text has to be gone through round by round.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from eagletwin.reference.mtp import draft_extend
from eagletwin.reference.rows import DraftRows, behind

from .device import on
from .draft import DraftModel
from .follow import NO, Followed, agreement


def follow_last_fed(
    draft: DraftModel,
    tokens: Sequence[int],
    hidden: Tensor,
    begin: int,
    num_steps: int,
    tie: float,
    starts: Sequence[int] | None,
) -> Followed:
    """What is accepted at the rounds of a text whose token x[begin] was the first that was emitted; elsewhere, nothing.

    starts: M of the rounds that an engine made; None: those that follow from what the layers propose.
    """
    count, heads = len(tokens), draft.heads[:num_steps]
    ids = torch.tensor(list(tokens), device=hidden.device)
    states = hidden.to(heads[0].embedding.dtype)
    agrees, chosen = np.full((count, num_steps), NO), np.full((count, num_steps), NO)
    found = Followed(agrees, chosen)
    stored: list[DraftRows | None] = [None] * len(heads)
    end, committed = 0, begin
    later = iter(starts[1:]) if starts is not None else None
    with torch.no_grad(), on(hidden.device):
        while committed < count - 1:
            rows = draft_extend(heads, draft.chained, ids[: committed + 1], states, range(end, committed), stored)
            stored = [behind(old, new) for old, new in zip(stored, rows, strict=True)]
            end = committed
            for step in range(min(num_steps, count - 1 - committed)):
                said = ids[committed + step + 1 : committed + step + 2]
                here = slice(committed, committed + 1), step
                agrees[here], chosen[here] = agreement(rows[step].logits[-1:], said, tie)
            committed = next(later, count) if later is not None else committed + found.accepted(committed) + 1
    return found
