"""Coins that are hashed from a request's seed and not drawn: SGLang's `_seeded_verify_coins` (srt/speculative/eagle_utils.py).

The hash is MurmurHash3_32 (A. Appleby, public domain) of sixteen bytes with seed 0: the low and the high half of the request's
seed, a position, and a column, 32 bits each.
"""

from collections.abc import Sequence

import torch

_WORD = 0xFFFFFFFF


def murmur3(words: Sequence[int]) -> int:
    """MurmurHash3_32 of these 32-bit words."""
    found = 0
    for word in words:
        mixed = (word & _WORD) * 0xCC9E2D51 & _WORD
        mixed = _rotated(mixed, 15) * 0x1B873593 & _WORD
        found = (_rotated(found ^ mixed, 13) * 5 + 0xE6546B64) & _WORD
    found ^= 4 * len(words)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        found = (found ^ found >> shift) * factor & _WORD
    return found ^ found >> 16


def _rotated(word: int, bits: int) -> int:
    return (word << bits | word >> 32 - bits) & _WORD


def seeded_coins(seed: int, committed: int, num_draft_tokens: int) -> list[float]:
    """The coins of a verify behind `committed` tokens: one for each of num_draft_tokens nodes, then the final one. float32."""
    hashes = [murmur3((seed, seed >> 32, committed, column)) for column in range(num_draft_tokens + 1)]
    coins = torch.tensor(hashes, dtype=torch.float64) / _WORD
    found: list[float] = coins.float().clamp(max=1 - 2.0**-24).tolist()
    return found
