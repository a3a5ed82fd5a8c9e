"""A request's logits with its penalties on tokens that it was sent before (reference/penalties.py), a row each.

All rows of a round are penalized by what was sent when it began: SGLang says of its penalties in verify that they are a relaxed
version of penalties. A row of a prefill, which gives one token, is penalized by all that was sent before that token.
"""

from collections.abc import Mapping, Sequence

import torch

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.case import Penalties
from eagletwin.reference.penalties import penalized


def penalized_rows(tokens: Sequence[int], first: int, began: Mapping[int, int], penalties: Penalties, logits: Array) -> Array:
    """logits [n, V] of rows first, first + 1, .., of which `first` is the prompt's last. began: of a row of a round the row
    that the round began with."""
    rows = []
    for row, own in enumerate(torch.from_numpy(logits), first):
        sent = [token for token in tokens[first + 1 : began.get(row, row) + 1] if 0 <= token < len(own)]
        rows.append(penalized(own, sent, penalties.frequency, penalties.presence, penalties.repetition))
    found: Array = torch.stack(rows).numpy() if rows else logits
    return found
