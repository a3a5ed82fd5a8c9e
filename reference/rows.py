"""What a draft head computes for each row, whatever head it is (eagle.py, eagle3.py, mtp_head.py)."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DraftRows:
    """One forward of a draft head over R rows.

    hidden [R, H]        residual sum: what the next draft step consumes, or the next layer of a chained MTP draft
    logits [R, V]        over the target's vocabulary; -inf for a token that the draft cannot propose
    keys   [L, R, G, D]  as the draft's KV pool stores them, after RoPE; of latent attention [L, R, 1, C+P] (mla.py)
    values [L, R, G, D]  of latent attention empty
    """

    hidden: Tensor
    logits: Tensor
    keys: Tensor
    values: Tensor


def behind(stored: DraftRows | None, rows: DraftRows) -> DraftRows:
    """Rows behind those that are stored, for later rows to see: keys and values of all, hidden and logits of the new ones.

    Logits are large, and few callers want those of all. stored: E rows, or None; rows: R -> keys and values [L, E + R, G, D].
    """
    if stored is None:
        return rows
    keys, values = torch.cat([stored.keys, rows.keys], 1), torch.cat([stored.values, rows.values], 1)
    return DraftRows(rows.hidden, rows.logits, keys, values)
