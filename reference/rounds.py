"""Many rounds of many requests at once: what chain.py and growth.py compute one at a time, in num_steps forwards in all.

A test holds the two forms equal. A batch is a mask here too: each row sees the committed rows of its own request before its
round, and the scratch rows of its own round that growth.lineage names. Rows that stand before a step's are not computed again
for it: they cannot depend on it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .chain import row_tokens
from .eagle import DraftRows, Head, draft_rows
from .growth import Growth, View, lineage
from .llama import side_by_side


def committed_side_by_side(head: Head, tokens: Sequence[Tensor], target_hidden: Tensor) -> DraftRows:
    """Committed rows of requests with final sequences tokens[q] [T], one request after the other: B rows in all.

    target_hidden [B, ..] holds h[0..T-2] of each.
    """
    _, positions, sees = side_by_side([len(sequence) - 1 for sequence in tokens])
    ids = torch.cat([row_tokens(sequence) for sequence in tokens])
    return draft_rows(head, ids, head.feed(target_hidden), positions, sees)


def draft_rounds(
    head: Head,
    committed: DraftRows,
    lengths: Sequence[int],
    rounds: Sequence[tuple[int, int]],
    tokens: Tensor,
    expanded: Tensor,
    view: View,
) -> Growth:
    """The Growth of C rounds, with C in front of each tensor's shape.

    committed: rows of requests, `lengths[q]` of each; round c is (q, M): it drafted from the first M rows of request q.
    tokens, expanded [C, S-1, k]: what each step's rows consumed, and which candidates they were.
    """
    count, steps, topk = tokens.shape
    of, start = torch.tensor(rounds, dtype=torch.int64).reshape(count, 2).unbind(1)  # [C] request and M of each round
    request, positions, _ = side_by_side(lengths)  # [B], [B]
    first = torch.tensor([0, *lengths]).cumsum(0)[of]  # [C] the first row of each round's request
    prefix = (request[None, :] == of[:, None]) & (positions[None, :] < start[:, None])  # [C, B]
    own = torch.eye(count, dtype=torch.bool)[:, None, None, None, :, None]
    scratch = lineage(expanded, view).view(count, steps, topk, steps, 1, topk) & own  # [C, S-1, k, S-1, C, k]
    # [C, S-1, k, B + (S-1)*C*k]: the rows of each step, and all there are; those of later steps it does not see
    sees = torch.cat([prefix[:, None, None].expand(-1, steps, topk, -1), scratch.flatten(3)], 3)
    last = first + start - 1  # [C] the row each round continues from
    logits, handed_on = (
        [committed.logits[last][:, None]],
        committed.hidden[last][:, None],
    )  # of rows so far [C, 1, V], [C, 1, H]
    proposer = (expanded // topk)[..., None].expand(-1, -1, -1, handed_on.shape[-1])  # [C, S-1, k, H]
    hidden, before, base = [], committed, committed.keys.shape[1]
    for step in range(steps):
        consumed = handed_on.gather(1, proposer[:, step])  # [C, k, H]
        rows = draft_rows(
            head,
            tokens[:, step].flatten(),
            consumed.flatten(0, 1),
            (start + step).repeat_interleave(topk),
            sees[:, step, :, : base + (step + 1) * count * topk].flatten(0, 1),  # [C*k, B + j*C*k]
            before,
        )
        before = DraftRows(
            rows.hidden, rows.logits, torch.cat([before.keys, rows.keys], 1), torch.cat([before.values, rows.values], 1)
        )
        logits.append(rows.logits.view(count, topk, rows.logits.shape[-1]))
        handed_on = torch.cat([handed_on, rows.hidden.view(count, topk, handed_on.shape[-1])], 1)
        hidden.append(consumed)

    def scratch_rows(stored: Tensor) -> Tensor:
        """[L, B + (S-1)*C*k, G, D] -> [C, S-1, k, L, G, D]."""
        apart = stored[:, base:].view(stored.shape[0], steps, count, topk, *stored.shape[2:])
        return apart.permute(2, 1, 3, 0, 4, 5)

    width = handed_on.shape[-1]
    return Growth(
        torch.cat(logits, 1),
        tokens,
        expanded,
        torch.stack(hidden, 1) if steps else handed_on.new_empty(count, 0, topk, width),
        handed_on[:, 1:].reshape(count, steps, topk, width),
        scratch_rows(before.keys),
        scratch_rows(before.values),
    )
