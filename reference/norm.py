"""What every model here is made of: weights by name, and the norm. Called by llama.py, mla.py, experts.py and the heads."""

from collections.abc import Mapping

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [.., H] scaled to unit root mean square, times weight [H]."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
