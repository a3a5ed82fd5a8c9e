"""How a draft tree grows (EAGLE-2), in the naive form: at each step the head runs over all rows of the request again.

A *row* of a round is what proposed k candidates: row 0 is the last committed row, and row 1 + (j - 1) * k + b is the one that
draft decode step j = 1..num_steps-1 ran for branch b, the b-th of its frontier. So candidate c was proposed by row c // k
(tree.py). A row consumes its own token and the hidden state of the row that proposed it, at position M + j - 1.

Which rows it attends to, beside the committed prefix and itself, is the *view* (DESIGN 3.4). `true_tree`: its ancestors.
`slot_layout`: the rows of the same branch number at earlier steps, since SGLang stores a branch's keys by its number and not
by its parent (PR #8409, never merged). The two are the same for topk = 1 and for num_steps <= 2.

Scores are sums of log-probabilities, as in SafeAILab/EAGLE; SGLang multiplies probabilities, which orders them alike.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .chain import WHOLE, Recent, decode_position, row_tokens, rows_behind
from .eagle import Head, draft_rows
from .llama import causal

View = Literal["true_tree", "slot_layout"]


@dataclass(frozen=True, slots=True)
class Growth:
    """One round's drafting; k = topk, S = num_steps, R = 1 + (S - 1) * k rows. (For C rounds at once: C in front.)

    logits    [R, V]           what row r proposed from
    tokens    [S-1, k]         what was consumed by the rows of each step
    expanded  [S-1, k]         candidates: the frontier of each step
    hidden    [S-1, k, H]      what the rows of each step consumed
    handed_on [S-1, k, H]      what they computed
    keys      [S-1, k, L, G, D]  scratch rows; keys after RoPE
    values    [S-1, k, L, G, D]
    """

    logits: Tensor
    tokens: Tensor
    expanded: Tensor
    hidden: Tensor
    handed_on: Tensor
    keys: Tensor
    values: Tensor


def path_sums(values: Tensor, expanded: Tensor, topk: int) -> Tensor:
    """Sum of a number over each candidate's path from the root. values [C, R, k] of candidates; expanded [C, S-1, k]."""
    sums = values[:, :1]  # the root's own candidates: nothing before them
    for step in range(expanded.shape[1]):
        so_far = sums.flatten(1).gather(1, expanded[:, step])  # [C, k] of the nodes expanded at this step
        rows = slice(1 + step * topk, 1 + (step + 1) * topk)
        sums = torch.cat([sums, values[:, rows] + so_far[:, :, None]], 1)
    return sums  # [C, R, k]


def candidates(logits: Tensor, expanded: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Tokens [C, R, k] of all candidates, best first in each row, and their scores [C, R, k]. logits [C, R, V]."""
    best = logits.log_softmax(-1).topk(topk)
    return best.indices, path_sums(best.values, expanded, topk)


def best_of(scores: Tensor, count: int) -> Tensor:
    """The `count` candidates of the largest score, best first. scores [.., N]; of equal ones the smaller number."""
    return scores.sort(descending=True, stable=True).indices[..., :count]


def lineage(expanded: Tensor, view: View) -> Tensor:
    """Which scratch rows of its round a scratch row attends to: sees [C, n, n], n = (S-1) * k. expanded [C, S-1, k]."""
    count, steps, topk = expanded.shape
    rows = torch.arange(steps * topk)
    if view == "slot_layout":
        same_branch = (rows[:, None] - rows[None, :]) % topk == 0
        return (same_branch & (rows[None, :] <= rows[:, None])).expand(count, -1, -1)
    sees = torch.eye(steps * topk, dtype=torch.bool).repeat(count, 1, 1)
    for row in range(topk, steps * topk):
        proposer = expanded.flatten(1)[:, row] // topk - 1
        sees[:, row] |= sees[torch.arange(count), proposer]
    return sees


def draft_tree(
    head: Head,
    tokens: Tensor,
    target_hidden: Tensor,
    topk: int,
    num_steps: int,
    view: View = "true_tree",
    follow: tuple[Tensor, Tensor] | None = None,
    reads: Recent = WHOLE,
) -> Growth:
    """Grow a tree behind the committed tokens x[0..M]; target_hidden [>= M, ..].

    follow: (tokens, expanded) [S-1, k] each, chosen by somebody else; the logits and rows are still the reference's.
    reads: what scratch rows read of the committed ones.
    """
    committed = rows_behind(head, len(tokens) - 1)
    ids, hidden, positions = row_tokens(tokens, head.ahead), head.feed(target_hidden[:committed]), torch.arange(committed)
    chosen = torch.empty(0, topk, dtype=torch.int64)  # frontiers so far
    frontier = torch.empty(0, topk, dtype=torch.int64)  # their tokens
    for step in range(num_steps):
        scratch = step * topk
        sees = causal(committed + scratch)
        sees[committed:, :committed] = reads.of(torch.arange(committed), committed)
        sees[committed:, committed:] = lineage(chosen[None], view)[0] if step else True
        rows = draft_rows(head, ids, hidden, positions, sees)
        if step == num_steps - 1:
            break
        proposed, scores = candidates(rows.logits[None, committed - 1 :], chosen[None], topk)
        if follow is None:
            newest = scores[0].flatten() if step == 0 else scores[0, 1 + scratch - topk :].flatten()
            expand = best_of(newest, topk) + (scores[0].numel() - newest.numel())  # only the newest depth is expanded
            drawn = proposed[0].flatten()[expand]
        else:
            drawn, expand = follow[0][step], follow[1][step]
        chosen, frontier = torch.cat([chosen, expand[None]]), torch.cat([frontier, drawn[None]])
        ids = torch.cat([ids, drawn])
        hidden = torch.cat([hidden, rows.hidden[committed - 1 + expand // topk]])  # of the row that proposed it
        positions = torch.cat([positions, torch.full((topk,), decode_position(head, committed, step + 1))])
    shape = (num_steps - 1, topk)
    return Growth(
        rows.logits[committed - 1 :],
        frontier,
        chosen,
        *(part[committed:].view(*shape, part.shape[1]) for part in (hidden, rows.hidden)),
        *(
            part[:, committed:].transpose(0, 1).reshape(*shape, part.shape[0], *part.shape[2:])
            for part in (rows.keys, rows.values)
        ),
    )


def select(logits: Tensor, expanded: Tensor, topk: int, count: int) -> tuple[list[int], list[int]]:
    """The `count` best of all candidates, in the order of their numbers, and their tokens: nodes 1.. of the verify tree.

    Of one round: logits [R, V], expanded [S-1, k].
    """
    tokens, scores = candidates(logits[None], expanded[None], topk)
    selected = best_of(scores.flatten(), count).sort().values
    return selected.tolist(), tokens.flatten()[selected].tolist()
