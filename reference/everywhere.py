"""Drafting behind every position of a text at once: what is proposed after each prefix of it.

With x[0..M] committed, step j of a chain matters only if d[1..j-1] are the text's own tokens, so each step consumes x[M+j]
here. The rows are those of chain.py and mtp.py, and tests hold them equal; a text is taken in blocks, since what its rows see
of each other grows with the square of its length. A draft of several layers has no provisional rows then: a row that would
consume a draft consumes the same token of the text. A tree chooses for itself, as growth.py does.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .chain import rows_behind
from .draft_heads import FrozenHead, behind
from .eagle import DraftRows, Head, draft_rows
from .growth import Growth, View
from .rounds import grow_rounds

BLOCK = 128  # rows: of the scratch rows in a block, each sees its own round's alone


def chains_everywhere(
    head: Head, tokens: Tensor, target_hidden: Tensor, num_steps: int, block: int = BLOCK
) -> Iterator[tuple[int, Tensor]]:
    """Blocks of (first, logits [C, S, V]): logits[c, j] is what d[j+1] is chosen from behind x[0..M], M = first + c.

    tokens x[0..n-1], target_hidden [>= n-1, ..]. M = 1..n-1 in all. Where x[M+j] lies behind the text, what step j says means
    nothing.
    """
    if isinstance(head, FrozenHead):
        yield 1, _standing(head, tokens, target_hidden, num_steps)
        return
    stored = _first(head, tokens)
    for begin in range(0, len(tokens) - 1, block):
        starts = torch.arange(begin + 1, min(begin + block, len(tokens) - 1) + 1)  # [C] M
        rows = _extend_rows(head, tokens[starts], head.feed(target_hidden[starts - 1]), starts - head.ahead, stored)
        before = stored = behind(stored, rows)
        sees = torch.arange(before.keys.shape[1])[None, :] <= (starts - head.ahead)[:, None]  # [C, B] committed rows
        own = torch.eye(len(starts), dtype=torch.bool)  # [C, C] scratch rows of one step
        logits = [rows.logits]
        for step in range(1, num_steps):
            sees = torch.cat([sees, own], 1)
            consumed = tokens[(starts + step).clamp(max=len(tokens) - 1)]
            rows = draft_rows(head, consumed, rows.hidden, starts + step - head.ahead, sees, before)
            before = behind(before, rows)
            logits.append(rows.logits)
        yield begin + 1, torch.stack(logits, 1)


def _standing(head: FrozenHead, tokens: Tensor, target_hidden: Tensor, num_steps: int) -> Tensor:
    """Logits [n-1, S, V] of chains_everywhere, of a head that reads the target's rows: no row of its own is ever read."""
    starts = torch.arange(1, len(tokens))  # [n-1] M
    sees = torch.arange(len(tokens) - 1)[None, :] < starts[:, None]  # [n-1, n-1]
    hidden, logits = target_hidden[: len(starts)], list[Tensor]()
    for step in range(num_steps):
        consumed = tokens[(starts + step).clamp(max=len(tokens) - 1)]
        rows = draft_rows(head, consumed, hidden, starts - 1, sees)
        hidden = rows.hidden
        logits.append(rows.logits)
    return torch.stack(logits, 1)


def committed_everywhere(head: Head, tokens: Tensor, target_hidden: Tensor, block: int = BLOCK) -> DraftRows | None:
    """The rows of a whole text x[0..n-1], as they are stored: keys and values [L, n - 1, G, D]; None if n is 1."""
    stored = _first(head, tokens)
    for begin in range(0, len(tokens) - 1, block):
        starts = torch.arange(begin + 1, min(begin + block, len(tokens) - 1) + 1)
        rows = _extend_rows(head, tokens[starts], head.feed(target_hidden[starts - 1]), starts - head.ahead, stored)
        stored = behind(stored, rows)
    return stored


def layers_everywhere(
    heads: Sequence[Head], chained: bool, tokens: Tensor, target_hidden: Tensor, block: int = BLOCK
) -> Iterator[tuple[int, Tensor]]:
    """The same of a draft of several layers, of which layer k proposes d[k+1]: logits [C, layers, V]."""
    stored: list[DraftRows | None] = [None] * len(heads)
    for begin in range(0, len(tokens) - 1, block):
        starts = torch.arange(begin + 1, min(begin + block, len(tokens) - 1) + 1)  # [C] M
        hidden, logits = target_hidden[starts - 1], []
        for layer, head in enumerate(heads):
            consumed = tokens[(starts + layer).clamp(max=len(tokens) - 1)]
            rows = _extend_rows(head, consumed, head.feed(hidden), starts - 1, stored[layer])
            stored[layer] = behind(stored[layer], rows)
            hidden = rows.hidden if chained else hidden
            logits.append(rows.logits)
        yield begin + 1, torch.stack(logits, 1)


def trees_everywhere(
    head: Head, tokens: Tensor, target_hidden: Tensor, topk: int, num_steps: int, view: View, block: int = BLOCK // 4
) -> Iterator[tuple[int, Growth]]:
    """Blocks of (first, the Growth of C rounds): tree c grows behind x[0..M], M = first + c. M = 1..n-1 in all."""
    stored = _first(head, tokens)
    for begin in range(0, len(tokens) - 1, block):
        end = min(begin + block, len(tokens) - 1)
        starts = torch.arange(begin + 1, end + 1)
        rows = _extend_rows(head, tokens[starts], head.feed(target_hidden[starts - 1]), starts - head.ahead, stored)
        before, stored = stored, behind(stored, rows)
        if before is not None:  # a round goes on from any of them
            hidden, logits = torch.cat([before.hidden, rows.hidden]), torch.cat([before.logits, rows.logits])
            stored = replace(stored, hidden=hidden, logits=logits)
        rounds = [(0, rows_behind(head, int(start))) for start in starts]
        yield begin + 1, grow_rounds(head, stored, [rows_behind(head, end)], rounds, topk, num_steps, view)


def _extend_rows(head: Head, tokens: Tensor, hidden: Tensor, positions: Tensor, stored: DraftRows | None) -> DraftRows:
    """Rows behind those that are stored, each of which sees all that stand before it."""
    sees = torch.arange(int(positions[-1]) + 1)[None, :] <= positions[:, None]
    return draft_rows(head, tokens, hidden, positions, sees, stored)


def _first(head: Head, tokens: Tensor) -> DraftRows | None:
    """What stands before the row that consumes x[1]: of a plain draft the row of x[0]."""
    if head.ahead == 1:
        return None
    return _extend_rows(head, tokens[:1], torch.empty(1, 0), torch.zeros(1, dtype=torch.int64), None)
