"""Drafts of every position of a text at once, each fed its own states: what a head does in a round, in a form to train.

Row i of step 0 is a committed row: it consumes the target's state. Row i of step j consumes the next token of the text, and the
state that row i of step j - 1 computed, as draft decode step j does behind M = i + 1 committed rows (chain.py). It sees the
committed rows up to i and its own earlier ones. A test holds this equal to the reference's chain.
"""

import torch
from torch import Tensor

from eagletwin.reference.draft_heads import behind
from eagletwin.reference.eagle import DraftRows, Head, draft_rows
from eagletwin.reference.llama import side_by_side


def unroll(head: Head, windows: Tensor, hidden: Tensor, layer: int, steps: int) -> list[DraftRows]:
    """Rows of each step, R = B * T of them, window after window; row i of step j proposes x[i + 2 + layer + j].

    windows [B, >= T + layer + steps] tokens; hidden [B, T, ..] the target's states, as it hands them over
    layer: 0, or a layer of an MTP draft, whose rows consume tokens that lie so much further ahead
    """
    count, length = hidden.shape[:2]
    _, positions, sees = side_by_side([length] * count)
    sees, own = sees.to(hidden.device), torch.eye(count * length, dtype=torch.bool, device=hidden.device)
    state, before, found = head.feed(hidden.flatten(0, 1)), None, list[DraftRows]()
    for step in range(steps):
        ahead = 1 + layer + step
        rows = draft_rows(head, windows[:, ahead : ahead + length].flatten(), state, positions + step, sees, before)
        found.append(rows)
        state, before = rows.hidden, behind(before, rows)
        sees = torch.cat([sees, own], 1)
    return found
