"""What a draft head computes for each row, whatever head it is (eagle.py, eagle3.py, mtp_head.py)."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class DraftRows:
    """One forward of a draft head over R rows.

    hidden [R, H]        residual sum: what the next draft step consumes, or the next layer of a chained MTP draft
    logits [R, V]        over the target's vocabulary; -inf for a token that the draft cannot propose
    keys   [L, R, G, D]  as the draft's KV pool stores them, after RoPE
    values [L, R, G, D]
    """

    hidden: Tensor
    logits: Tensor
    keys: Tensor
    values: Tensor
