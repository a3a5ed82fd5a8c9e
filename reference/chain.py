"""The draft chain for topk = 1: which token, hidden state and position each draft row consumes.

Two kinds of rows. *Committed rows* (DESIGN 3.1): row i consumes (x[i+1], h[i]) at position i, so it is a function of
x[0..i+1] alone. *Scratch rows* (DESIGN 3.3): with x[0..M] committed, draft decode step j = 1..num_steps-1 consumes
(d[j], hidden state of the row before it) at position M + j - 1 and proposes d[j+1].
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .eagle import DraftRows, Head, draft_rows
from .llama import causal, side_by_side


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


def row_tokens(tokens: Tensor) -> Tensor:
    """Token that each committed row consumes: x[0..M] -> x[1..M], one per row 0..M-1 (DESIGN 3.1, 3.2).

    A chunk boundary makes no difference: the tail row K-1 of a chunk that ends at K consumes x[K], the next *prompt* token
    (PR #26329). After retraction the prompt is everything already committed.
    """
    return tokens[1:]


def committed_rows(head: Head, tokens: Tensor, target_hidden: Tensor) -> DraftRows:
    """Rows 0..M-1 of a request with committed tokens x[0..M]; target_hidden [>=M, ..] holds h[0..M-1]."""
    rows = len(tokens) - 1
    return draft_rows(head, row_tokens(tokens), head.feed(target_hidden[:rows]), torch.arange(rows), causal(rows))


def draft_chain(
    head: Head, tokens: Tensor, target_hidden: Tensor, num_steps: int, drafted: Sequence[int] | None = None
) -> Chain:
    """Draft num_steps tokens after the committed tokens x[0..M] in the naive form: each step runs the head over all rows again.

    Step j consumes d[j]. Give `drafted` to follow tokens that somebody else chose (a tie that went the other way) while the
    logits and rows are still the reference's.
    """
    committed = len(tokens) - 1  # M rows
    ids, hidden = row_tokens(tokens), head.feed(target_hidden[:committed])
    chosen: list[int] = []
    for step in range(num_steps):
        rows = draft_rows(head, ids, hidden, torch.arange(len(ids)), causal(len(ids)))
        chosen.append(int(rows.logits[-1].argmax()) if drafted is None else int(drafted[step]))
        if step == num_steps - 1:
            break
        ids = torch.cat([ids, torch.tensor([chosen[-1]])])  # row M + step consumes d[step+1] at position M + step
        hidden = torch.cat([hidden, rows.hidden[-1:]])
    return Chain(
        rows.logits[committed - 1 :],
        torch.tensor(chosen),
        hidden[committed:],
        rows.hidden[committed:],
        rows.keys[:, committed:].transpose(0, 1),
        rows.values[:, committed:].transpose(0, 1),
    )


def draft_chains(
    head: Head, tokens: Sequence[Tensor], target_hidden: Tensor, rounds: Sequence[tuple[int, int]], drafted: Tensor
) -> tuple[DraftRows, list[Chain]]:
    """Committed rows, and the chains of many rounds, of many requests at once. Equal to the naive functions above (a test).

    tokens[q] [T] is the final sequence of request q, and target_hidden [B, ..] holds the rows 0..T-2 of all requests, one
    request after the other, as do the committed rows that are returned. Round c is (q, M): it drafted drafted[c] [C, S] from
    the first M rows of request q.
    The head runs once per step over the committed rows and every round's scratch rows; a scratch row sees the committed
    rows of its request before its round and the scratch rows of its own round. num_steps forwards, whatever C is.
    """
    count, num_steps = drafted.shape
    lengths = [len(sequence) - 1 for sequence in tokens]
    base = sum(lengths)  # committed rows 0..base-1
    request, positions, sees = side_by_side(lengths)  # [B], [B], [B, B]
    ids, hidden = torch.cat([row_tokens(sequence) for sequence in tokens]), head.feed(target_hidden)  # [B], [B, H]
    of, start = torch.tensor(rounds, dtype=torch.int64).reshape(count, 2).unbind(1)  # [C] request and M of each round
    owner = torch.full((base,), -1)  # [B] which round a row belongs to; -1: committed
    prefix = positions + 1  # [B] how many committed rows of its request a row may see
    rows = draft_rows(head, ids, hidden, positions, sees)
    last = (request[None, :] < of[:, None]).sum(1) + start - 1  # [C] the row each round continues from
    logits = [rows.logits[last]]  # of step 0..: [C, V] each
    for step in range(1, num_steps):
        ids = torch.cat([ids, drafted[:, step - 1]])  # [R], and so are those below: C rows more than the step before
        hidden = torch.cat([hidden, rows.hidden[last]])
        positions = torch.cat([positions, start + step - 1])
        request = torch.cat([request, of])
        owner = torch.cat([owner, torch.arange(count)])
        prefix = torch.cat([prefix, start])
        mine = request[None, :] == request[:, None]  # [R, R] both rows of one request
        shared = (owner[None, :] < 0) & (positions[None, :] < prefix[:, None])  # [R, R] a committed row within the prefix
        same = (owner[None, :] == owner[:, None]) & (owner[:, None] >= 0)  # [R, R] both scratch rows of one round
        sees = (mine & shared) | (same & (positions[None, :] <= positions[:, None]))  # [R, R]
        rows = draft_rows(head, ids, hidden, positions, sees)
        last = len(ids) - count + torch.arange(count)  # [C]
        logits.append(rows.logits[last])
    scratch = base + torch.arange(num_steps - 1)[None, :] * count + torch.arange(count)[:, None]  # [C, S-1]
    chains = zip(
        torch.stack(logits, 1),  # [C, S, V]
        drafted,
        hidden[scratch],  # [C, S-1, H]
        rows.hidden[scratch],
        rows.keys[:, scratch].movedim(0, 2),  # [C, S-1, L, G, D]
        rows.values[:, scratch].movedim(0, 2),
        strict=True,
    )
    committed = DraftRows(rows.hidden[:base], rows.logits[:base], rows.keys[:, :base], rows.values[:, :base])
    return committed, [Chain(*chain) for chain in chains]
