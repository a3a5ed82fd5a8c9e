"""How SGLang lays a draft tree out: slots in front of its branches, and the parts of its mask."""

import numpy as np

from eagletwin.harness.core.arrays import Array


def holes_of(slots: Array, length: int, page: int) -> Array:
    """Slots [(topk - 1) * n] between the start of a page and where a branch begins in it, of branches 1..; slots [topk, S].

    length: of the committed prefix. Branch 0 begins in the page that it ends in, and has none of its own.
    """
    inside = length % page if len(slots) > 1 else 0
    if not inside:
        return np.empty(0, np.int64)
    # a wrong slot must reach the judge, not break the tap
    return np.maximum(slots[1:, :1] - inside + np.arange(inside), 0).ravel()


def tree_masks(mask: Array, mode: str, width: int, lengths: list[int]) -> list[Array]:
    """The tree's part of each request's mask [D, D]; D = width = num_draft_tokens. What lies before it belongs to the prefix.

    mode: name of SGLang's TreeMaskMode.
    """
    masks, begin = [], 0
    if mode == "QLEN_ONLY_BITPACKING":
        bits = mask.astype(np.int64).reshape(-1, width, 1) >> np.arange(width)
        return list((bits & 1).astype(np.bool_)[: len(lengths)])
    for length in lengths:
        row = width + (length if mode == "FULL_MASK" else 0)
        masks.append(mask[begin : begin + width * row].reshape(width, row)[:, row - width :])
        begin += width * row
    return masks
