"""Rotary position embedding in the half-split convention of Hugging Face's Llama, and how it is stretched to longer contexts.

Pair (d, d + D/2) of a head turns by the angle position * theta**(-2d/D). A model whose context was lengthened afterwards turns
some pairs more slowly. Sources: RoFormer (arXiv 2104.09864); `linear` is position interpolation (arXiv 2306.15595), `yarn`
arXiv 2309.00071 §3.2-3.4, `llama3` the form that Llama 3.1's configuration names. Checked against transformers' own
functions in tests/reference/test_rope.py.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from .sizes import RopeScaling


@lru_cache
def frequencies(half: int, theta: float, scaling: RopeScaling | None = None) -> Tensor:
    """Angle per position of each pair of a head [D/2], float64."""
    plain = theta ** (-torch.arange(half, dtype=torch.float64, device="cpu") / half)  # [D/2]
    if scaling is None:
        return plain
    slow = plain / scaling.factor
    kept = _kept(plain, theta, scaling)  # [D/2]
    return plain * kept + slow * (1 - kept)


def _kept(plain: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """How much of each pair's own frequency is kept [D/2]: 0 for a pair that is slowed down, 1 for one that is not."""
    if scaling.kind == "linear":
        return torch.zeros_like(plain)
    if scaling.kind == "llama3":  # between the limits, in a straight line over the turns within the original length
        turned = scaling.original * plain / (2 * math.pi)  # [D/2]
        return ((turned - scaling.seldom) / (scaling.often - scaling.seldom)).clamp(0, 1)

    # yarn: in a straight line over the number of the pair
    def pair_that_turns(times: float) -> float:
        return len(plain) * math.log(scaling.original / (times * 2 * math.pi)) / math.log(theta)

    often, seldom = pair_that_turns(scaling.often), pair_that_turns(scaling.seldom)
    if scaling.truncate:
        often, seldom = math.floor(often), math.ceil(seldom)
    often, seldom = max(often, 0), min(seldom, 2 * len(plain) - 1)
    width = max(seldom - often, 1e-3)
    return 1 - ((torch.arange(len(plain), dtype=torch.float64, device="cpu") - often) / width).clamp(0, 1)


@lru_cache
def turns(
    length: int, half: int, theta: float, scaling: RopeScaling | None, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles at positions 0..length-1, for all heads: [length, 1, D/2] each. Angles are float64."""
    angle = torch.arange(length, dtype=torch.float64, device="cpu")[:, None] * frequencies(half, theta, scaling)
    amplitude = 1.0 if scaling is None else scaling.amplitude
    cos, sin = (amplitude * part[:, None] for part in (angle.cos(), angle.sin()))
    return cos.to(device, dtype), sin.to(device, dtype)


def rotate(
    x: Tensor, positions: Tensor, theta: float, scaling: RopeScaling | None = None, *, interleaved: bool = False
) -> Tensor:
    """x [T, N, D] turned by its positions [T] -> [T, N, D].

    interleaved: a pair is (2d, 2d + 1) and not (d, d + D/2), as RoFormer and DeepSeek have it.
    """
    half = x.shape[-1] // 2
    last = int(positions.max()) if len(positions) else 0
    length = 1 << last.bit_length()  # of few lengths, so that no angle's sine is worked out often
    cos, sin = (turn[positions] for turn in turns(length, half, theta, scaling, x.dtype, x.device))  # [T, 1, D/2]
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])  # [T, N, D/2]
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
