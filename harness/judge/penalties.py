"""A request's logits with its penalties on tokens that it was sent before, and its min_new_tokens (reference/sampling.py), one
row each.

All rows of a round are penalized by what was sent when it began: SGLang says of its penalties in verify that they are a relaxed
version of penalties. A row of a prefill, which gives one token, is penalized by all that was sent before that token.
"""

from collections.abc import Mapping, Sequence

import torch

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.case import Penalties, Request
from eagletwin.reference.sampling import held_back, penalized


def penalized_rows(request: Request, ends: int, tokens: Sequence[int], began: Mapping[int, int], logits: Array) -> Array:
    """logits [n, V] of the rows from the prompt's last on. ends: the end-of-sequence token, which min_new_tokens holds back as
    it does the request's own. began: of a row of a round the row that the round began with."""
    first, penalties, rows = len(request.prompt) - 1, request.penalties or Penalties(), []
    for row, own in enumerate(torch.from_numpy(logits), first):
        before = tokens[first + 1 : began.get(row, row) + 1]
        sent = [token for token in before if 0 <= token < len(own)]
        changed = penalized(own, sent, penalties.frequency, penalties.presence, penalties.repetition)
        stops = [token for token in {*request.stop, ends} if token < len(own)]
        rows.append(held_back(changed, len(before), request.min_new_tokens, stops))
    found: Array = torch.stack(rows).numpy() if rows else logits
    return found
