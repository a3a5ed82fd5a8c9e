"""Many rounds of many requests at once: what chain.py and growth.py compute one at a time, in num_steps forwards in all.

A test holds the two forms equal. A batch is a mask here too: each row sees the committed rows of its own request before its
round, and the scratch rows of its own round that growth.lineage names. Rows that stand before a step's are not computed again
for it: they cannot depend on it.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .chain import WHOLE, Recent, decode_position, row_tokens, rows_behind
from .draft_heads import behind
from .eagle import DraftRows, Head, draft_rows
from .growth import Growth, View, best_of, candidates, lineage
from .llama import side_by_side

# (logits so far [C, R, V], frontiers so far [C, s, k]) -> what the rows of the next step consume, and which candidates they are
Choose = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def committed_side_by_side(head: Head, tokens: Sequence[Tensor], target_hidden: Tensor) -> DraftRows:
    """Committed rows of requests with final sequences tokens[q] [T], one request after the other: B rows in all.

    target_hidden [B, ..] holds h[0..T-2] of each. A plain draft reads none, and has T rows of each.
    """
    _, positions, sees = side_by_side([rows_behind(head, len(sequence) - 1) for sequence in tokens])
    ids = torch.cat([row_tokens(sequence, head.ahead) for sequence in tokens])
    return draft_rows(head, ids, head.feed(target_hidden), positions, sees)


def draft_rounds(
    head: Head | Sequence[Head],
    committed: DraftRows,
    lengths: Sequence[int],
    rounds: Sequence[tuple[int, int]],
    tokens: Tensor,
    expanded: Tensor,
    view: View,
    reads: Recent = WHOLE,
) -> Growth:
    """The Growth of C rounds that somebody else chose, with C in front of each tensor's shape.

    committed: rows of requests, `lengths[q]` of each; round c is (q, M): it drafted from the first M rows of request q (of a
    plain draft M + 1: chain.rows_behind).
    tokens, expanded [C, S-1, k]: what each step's rows consumed, and which candidates they were.
    head: of all steps, or of each. reads: what scratch rows read of the committed ones.
    """

    def recorded_choice(_: Tensor, so_far: Tensor) -> tuple[Tensor, Tensor]:
        return tokens[:, so_far.shape[1]], expanded[:, so_far.shape[1]]

    _, steps, topk = tokens.shape
    heads = head if isinstance(head, Sequence) else [head] * steps
    return _grow(heads, committed, _Rounds(lengths, rounds, reads), (steps, topk), view, recorded_choice)


def grow_rounds(
    head: Head,
    committed: DraftRows,
    lengths: Sequence[int],
    rounds: Sequence[tuple[int, int]],
    topk: int,
    num_steps: int,
    view: View,
) -> Growth:
    """The Growth of C rounds as the head itself chooses: draft_tree of each, with C in front of each tensor's shape."""

    def best(logits: Tensor, so_far: Tensor) -> tuple[Tensor, Tensor]:
        proposed, scores = candidates(logits, so_far, topk)  # [C, R, k]
        newest = scores[:, -topk if so_far.shape[1] else 0 :].flatten(1)  # of the last depth alone
        expand = best_of(newest, topk) + scores[0].numel() - newest.shape[1]  # [C, k]
        return proposed.flatten(1).gather(1, expand), expand

    heads = [head] * (num_steps - 1)
    return _grow(heads, committed, _Rounds(lengths, rounds, WHOLE), (num_steps - 1, topk), view, best)


class _Rounds:
    """Where C rounds stand among B committed rows.

    start  [C]     rows before each round: M, or M + 1 of a plain draft
    last   [C]     the row that it continues from
    prefix [C, B]  which committed rows its scratch rows see
    """

    def __init__(self, lengths: Sequence[int], rounds: Sequence[tuple[int, int]], reads: Recent) -> None:
        of, self.start = torch.tensor(rounds, dtype=torch.int64).reshape(len(rounds), 2).unbind(1)  # [C] request and M
        request, positions, _ = side_by_side(lengths)  # [B], [B]
        self.last = torch.tensor([0, *lengths]).cumsum(0)[of] + self.start - 1
        self.prefix = (request[None, :] == of[:, None]) & reads.of(positions[None, :], self.start[:, None])

    def sees(self, expanded: Tensor, view: View) -> Tensor:
        """[C*k, B + s*C*k]: what the rows of the s-th step see. expanded [C, s, k]."""
        count, steps, topk = expanded.shape
        own = torch.eye(count, dtype=torch.bool)[:, None, None, :, None]  # [C, 1, 1, C, 1]
        scratch = lineage(expanded, view)[:, -topk:].reshape(count, topk, steps, 1, topk) & own  # [C, k, s, C, k]
        return torch.cat([self.prefix[:, None].expand(-1, topk, -1), scratch.flatten(2)], 2).flatten(0, 1)


def _grow(
    heads: Sequence[Head], committed: DraftRows, rounds: _Rounds, shape: tuple[int, int], view: View, choose: Choose
) -> Growth:
    """shape: (S-1, k)."""
    (steps, topk), count = shape, len(rounds.start)
    before, base = committed, committed.keys.shape[1]
    # of rows so far [C, R, V], [C, R, H]
    logits, handed_on = committed.logits[rounds.last][:, None], committed.hidden[rounds.last][:, None]
    tokens = torch.empty(count, 0, topk, dtype=torch.int64)
    expanded, hidden = tokens, handed_on.new_empty(count, 0, topk, handed_on.shape[-1])
    for step in range(steps):
        drawn, expand = choose(logits, expanded)  # [C, k]
        tokens, expanded = torch.cat([tokens, drawn[:, None]], 1), torch.cat([expanded, expand[:, None]], 1)
        proposer = (expand // topk)[..., None].expand(-1, -1, handed_on.shape[-1])  # [C, k, H]
        consumed = handed_on.gather(1, proposer)  # [C, k, H]
        rows = draft_rows(
            heads[step],
            drawn.flatten(),
            consumed.flatten(0, 1),
            decode_position(heads[step], rounds.start, step + 1).repeat_interleave(topk),
            rounds.sees(expanded, view),  # [C*k, B + (step+1)*C*k]
            before,
        )
        before = behind(before, rows)
        logits = torch.cat([logits, rows.logits.view(count, topk, rows.logits.shape[-1])], 1)
        handed_on = torch.cat([handed_on, rows.hidden.view(count, topk, handed_on.shape[-1])], 1)
        hidden = torch.cat([hidden, consumed[:, None]], 1)

    def scratch_rows(stored: Tensor) -> Tensor:
        """[L, B + (S-1)*C*k, G, D] -> [C, S-1, k, L, G, D]."""
        apart = stored[:, base:].view(stored.shape[0], steps, count, topk, *stored.shape[2:])
        return apart.permute(2, 1, 3, 0, 4, 5)

    ran = handed_on[:, 1:].reshape(count, steps, topk, handed_on.shape[-1])
    return Growth(logits, tokens, expanded, hidden, ran, scratch_rows(before.keys), scratch_rows(before.values))
