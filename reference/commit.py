"""What a verified tree commits, as functions of integers: tokens, lengths, and which rows move where.

After verify, the accepted path lies at the front of the request's block: node path[i] becomes row i. Draft extend then runs
over the whole block, and what follows the path is garbage that nobody may read. A path begins with node 0, so its length
is the accept length, which counts the bonus token. tree.py's walk_greedy finds paths.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

Move = tuple[int, int]  # (from slot, to slot)


def committed_tokens(argmax: Sequence[int], path: Sequence[int]) -> list[int]:
    """The new tokens [len(path)]: the target's choice at each node of the path. The last is the bonus token."""
    return [argmax[node] for node in path]


def bonus_token(argmax: Sequence[int], path: Sequence[int]) -> int:
    """The token that the target has not consumed yet: its choice at the last accepted node."""
    return argmax[path[-1]]


def accept_row(path: Sequence[int], first: int, width: int) -> list[int]:
    """The path as SGLang's `accept_index` has it [width]: nodes counted through the batch from `first` on, then -1."""
    return [first + node for node in path] + [-1] * (width - len(path))


def kv_moves(path: Sequence[int], slots: Sequence[int]) -> list[Move]:
    """Moves of KV rows [len(path)]: from node path[i]'s slot to node i's. slots [D] of the verified nodes; PR #26997."""
    return [(slots[node], slots[place]) for place, node in enumerate(path)]


def moved(rows: Tensor, moves: Sequence[Move]) -> Tensor:
    """rows [slots, ..] after the moves, all at once: what a move reads is what was there before any of them."""
    after = rows.clone()
    after[torch.tensor([to for _, to in moves], dtype=torch.int64)] = rows[
        torch.tensor([at for at, _ in moves], dtype=torch.int64)
    ]
    return after


def last_row(request: int, accept_len: int, num_draft_tokens: int) -> int:
    """Row of the batch's draft extend, D rows a request, that the next round is drafted from: its last committed one."""
    return request * num_draft_tokens + accept_len - 1


def tracked_place(committed: int, accept_len: int, interval: int) -> int | None:
    """Which place of the path makes the request's length the last multiple of `interval` it reaches; None: it reaches none.

    Recurrent states are kept at such lengths (SGLang's mamba track), and must be taken after that token, not after the last.
    """
    multiple = (committed + accept_len) // interval * interval
    return multiple - committed - 1 if multiple > committed else None


def rotated(ids: Sequence[int], token: int) -> list[int]:
    """Shifted one to the left, with `token` at the end: row i consumes what row i + 1 did. Of no ids none are left."""
    return [*ids[1:], token] if ids else []
