"""Low-rank adapters (LoRA, arXiv 2106.09685 §4.1): a linear map W becomes W + scale · B A, and nothing else changes."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from .norm import Weights


@dataclass(frozen=True, slots=True)
class LowRank:
    """What is added to one linear map of I inputs and O outputs.

    down [R, I]  A: the input, in R numbers
    up   [O, R]  B: what these add to the output, scale times
    """

    down: Tensor
    up: Tensor
    scale: float


def adapted(weights: Weights, adapter: Mapping[str, LowRank]) -> Weights:
    """The weights of a model with this adapter, which names the weights that it changes."""
    changed = {name: weights[name] + part.scale * (part.up @ part.down) for name, part in adapter.items()}
    return {**weights, **changed}
