"""How the numbers of a trace fall into rows that are compared by a magnitude of their own. Shared by the judge and `diff`."""

import numpy as np
import torch
from torch import Tensor

from eagletwin.harness.core.arrays import Array

from .bounds import magnitude

# A product of probabilities below float32's smallest normal number (e**-87.3) has lost its digits: such scores are all equal.
SMALLEST_LOG = -87.0


def kv_parts(rows: Array) -> int:
    """Into how many parts a KV row of [n, 2, L, G, D] falls: the keys and the values of each layer. An error that is small next
    to the keys may be all that a value is."""
    return int(rows.shape[1] * rows.shape[2])


def logs(probabilities: Array) -> Array:
    """Logarithms, down to that of float32's smallest normal number. A NaN stays one."""
    return np.maximum(np.log(probabilities, dtype=np.float64), SMALLEST_LOG)


def log_scale(logits: Array, temperature: float = 1.0) -> Array:
    """Magnitude that the bound of a log-probability scales with: it is a difference of two of its row's logits [.., V], each of
    which may be off by the bound. -> [..]"""
    scale: Array = 2 * magnitude(logits) / temperature
    return scale


def with_tail(actual: Tensor, expected: Tensor) -> Tensor:
    """A row [V] with its tail put back, where it is 0: the smallest probabilities, as far as their sum is lost in the rounding
    of a float32 sum of all. A cut at top_p 1, made for another request of the batch, may take them off."""
    order = expected.argsort()
    lost = torch.zeros_like(expected, dtype=torch.bool)
    lost[order] = expected[order].cumsum(0) <= sum_rounding(len(expected))
    return torch.where(lost & (actual == 0), expected, actual.double())


def sum_rounding(size: int) -> float:
    """Of any float32 sum of `size` probabilities, in whatever order."""
    return (size + 16) * 2.0**-24
