"""Coins and noise that are hashed from a request's seed and not drawn.

SGLang's `_seeded_verify_coins` (srt/speculative/eagle_utils.py) hashes coins. vLLM's model runner V2
(vllm.v1.worker.gpu.sample.gumbel) hashes a coin of each row by Philox, and noise for each token by MurmurHash3: a token is
drawn as the largest sum of its logarithm and Gumbel noise (arXiv 1411.0030), which has the same distribution as a coin in the
running sum.

The hash is MurmurHash3_32 (A. Appleby, public domain) of sixteen bytes with seed 0: the low and the high half of the request's
seed, a position, and a column, 32 bits each.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


def murmur3(words: Sequence[int]) -> int:
    """MurmurHash3_32 of these 32-bit words."""
    found = 0
    for word in words:
        mixed = (word & _WORD) * 0xCC9E2D51 & _WORD
        mixed = _rotate_left(mixed, 15) * 0x1B873593 & _WORD
        found = (_rotate_left(found ^ mixed, 13) * 5 + 0xE6546B64) & _WORD
    found ^= 4 * len(words)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        found = (found ^ found >> shift) * factor & _WORD
    return found ^ found >> 16


def _rotate_left(word: int, bits: int) -> int:
    return (word << bits | word >> 32 - bits) & _WORD


def seeded_coins(seed: int, committed: int, num_draft_tokens: int) -> list[float]:
    """The coins of a verify behind `committed` tokens: one for each of num_draft_tokens nodes, then the final one. float32."""
    hashes = [murmur3((seed, seed >> 32, committed, column)) for column in range(num_draft_tokens + 1)]
    coins = torch.tensor(hashes, dtype=torch.float64) / _WORD
    found: list[float] = coins.float().clamp(max=1 - 2.0**-24).tolist()
    return found


def gumbel_noise(seed: int, position: int, vocabulary: int) -> Tensor:
    """[V] float64: the noise of each token at a position. The hash, of token ids as columns, is the middle of its interval."""
    hashes = [murmur3((seed, seed >> 32, position, token)) for token in range(vocabulary)]
    return -torch.log(-torch.log1p(-(torch.tensor(hashes, dtype=torch.float64) + 0.5) / (_WORD + 1)))


def positional_coin(seed: int, position: int) -> float:
    """The coin of the row at a position: Philox4x32-10 (Salmon et al., SC 2011) whose key is the seed, and whose counter is the
    position. Its first word, folded to 31 bits, times a number below 2**-31; never 0. float32."""
    counter, key = [position & _WORD, 0, 0, 0], [seed & _WORD, seed >> 32 & _WORD]
    for _ in range(10):
        products = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        first, third = products[1] >> 32 ^ counter[1] ^ key[0], products[0] >> 32 ^ counter[3] ^ key[1]
        counter = [first, products[1] & _WORD, third, products[0] & _WORD]
        key = [key[0] + 0x9E3779B9 & _WORD, key[1] + 0xBB67AE85 & _WORD]
    word = counter[0]
    folded = word if word < 1 << 31 else _WORD - word
    scale = torch.tensor(4.6566127342e-10)
    return max(float(torch.tensor(float(folded)) * scale), float(scale))
