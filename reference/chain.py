"""The draft chain for topk = 1: which token, hidden state and position each draft row consumes.

Two kinds of rows. *Committed rows* (DESIGN 3.1): row i consumes (x[i+1], h[i]) at position i, so it is a function of
x[0..i+1] alone. *Scratch rows* (DESIGN 3.3): with x[0..M] committed, draft decode step j = 1..num_steps-1 consumes
(d[j], hidden state of the row before it) at position M + j - 1 and proposes d[j+1].

A plain language model is a draft without hidden states, whose row i consumes x[i] (draft_heads.py): `head.ahead` is 0 then, row
M is a committed row too, and step j stands at position M + j.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from .eagle import DraftRows, Head, draft_rows
from .llama import causal

# What draft decode reads of the committed prefix: all of it, or its first rows and its last (StreamingLLM).
#
# Source: StreamingLLM (arXiv 2309.17453) §3.2, which keeps the first rows, the *sink*, and a window of the newest. A draft that
# is told to read no more of its prefix drafts faster in a long context. Only draft decode is cut: committed rows are computed
# over the whole prefix, and so is what the target verifies. That the window is of committed rows alone, and that the rows of
# the same round are read beside it, is SGLang's (--speculative-draft-window-size, --speculative-draft-sink-size).


@dataclass(frozen=True, slots=True)
class Recent:
    """The first `sink` rows of a prefix and the last `window`; all of it where window is 0."""

    window: int = 0
    sink: int = 0

    def of(self, positions: Tensor, prefix: Tensor | int) -> Tensor:
        """Which rows at these positions a round reads whose prefix has so many: bool, of the two's common shape."""
        if not self.window:
            return positions < prefix
        return (positions < prefix) & ((positions < self.sink) | (positions >= prefix - self.window))


WHOLE = Recent()


Rows = TypeVar("Rows", int, Tensor)  # how many, of one request or of each


@dataclass(frozen=True, slots=True)
class Chain:
    """One round's drafting from a committed prefix x[0..M]; S = num_steps.

    logits   [S, V]            row j is what d[j+1] was chosen from
    drafted  [S]               d[1..S]: the argmax of each row of logits, or the tokens that were given
    hidden   [S-1, H]          what step j = 1..S-1 consumes
    handed_on [S-1, H]         what step j computes: d[j+1] is chosen from it, and step j+1 consumes it
    keys     [S-1, L, G, D]    scratch row of step j, at position M + j - 1
    values   [S-1, L, G, D]
    """

    logits: Tensor
    drafted: Tensor
    hidden: Tensor
    handed_on: Tensor
    keys: Tensor
    values: Tensor


def row_tokens(tokens: Tensor, ahead: int = 1) -> Tensor:
    """Token that each committed row consumes: x[0..M] -> x[1..M], one per row 0..M-1 (DESIGN 3.1, 3.2).

    Of a plain draft x[0..M], one per row 0..M: ahead is 0.

    A chunk boundary makes no difference: the tail row K-1 of a chunk that ends at K consumes x[K], the next *prompt* token
    (PR #26329). After retraction the prompt is everything already committed.
    """
    return tokens[ahead:]


def rows_behind(head: Head, last: int) -> int:
    """How many committed rows there are with x[0..last]: d[1] is chosen from the last of them."""
    return last + 1 - head.ahead


def decode_position(head: Head, committed: Rows, step: int) -> Rows:
    """Where draft decode step `step`, from 1 on, stands behind so many committed rows: a head that does not move stays with the
    last of them (draft_heads.py)."""
    return committed + step - 1 if head.moves else committed - 1


def committed_rows(head: Head, tokens: Tensor, target_hidden: Tensor) -> DraftRows:
    """Rows 0..M-1 of a request with committed tokens x[0..M]; target_hidden [>=M, ..] holds h[0..M-1]."""
    rows = rows_behind(head, len(tokens) - 1)
    return draft_rows(head, row_tokens(tokens, head.ahead), head.feed(target_hidden[:rows]), torch.arange(rows), causal(rows))


def draft_chain(
    head: Head,
    tokens: Tensor,
    target_hidden: Tensor,
    num_steps: int,
    drafted: Sequence[int] | None = None,
    reads: Recent = WHOLE,
) -> Chain:
    """Draft num_steps tokens after the committed tokens x[0..M] in the naive form: each step runs the head over all rows again.

    Step j consumes d[j]. Give `drafted` to follow tokens that somebody else chose (a tie that went the other way) while the
    logits and rows are still the reference's. reads: what steps 1.. read of the committed rows.
    """
    committed = rows_behind(head, len(tokens) - 1)
    ids, hidden = row_tokens(tokens, head.ahead), head.feed(target_hidden[:committed])
    positions, chosen = list(range(committed)), list[int]()
    for step in range(num_steps):
        sees = causal(len(ids))
        sees[committed:, :committed] = reads.of(torch.arange(committed), committed)
        rows = draft_rows(head, ids, hidden, torch.tensor(positions), sees)
        chosen.append(int(rows.logits[-1].argmax()) if drafted is None else int(drafted[step]))
        if step == num_steps - 1:
            break
        ids = torch.cat([ids, torch.tensor([chosen[-1]])])  # consumes d[step+1] at the next position
        positions.append(decode_position(head, committed, step + 1))
        hidden = torch.cat([hidden, rows.hidden[-1:]])
    return Chain(
        rows.logits[committed - 1 :],
        torch.tensor(chosen),
        hidden[committed:],
        rows.hidden[committed:],
        rows.keys[:, committed:].transpose(0, 1),
        rows.values[:, committed:].transpose(0, 1),
    )
