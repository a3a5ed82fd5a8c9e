"""A feed-forward layer of experts as gpt-oss has it: biases everywhere, a clamped gate, and a softmax over the chosen alone.

The router's logits have a bias, and rank the experts; the weights of those that are chosen are the softmax of their logits. In
an expert the gate is clamped from above and the other part from both sides, and one is added to the latter. Columns of gate and
of the other part take turns. Source: OpenAI's model card of gpt-oss (arXiv 2508.10925) §2, for a clamped SwiGLU with a residual
term; its numbers, and the order of columns, are in OpenAI's published model alone.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from .experts_followed import followed
from .norm import Weights
from .sizes import ClampedExperts


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which experts each row goes to, and with which weight: [R, K] each."""

    experts: Tensor
    weight: Tensor


def route(weights: Weights, prefix: str, shape: ClampedExperts, inner: Tensor) -> Chosen:
    """The experts of rows inner [R, H]."""
    logits = linear(inner, weights[f"{prefix}router.weight"], weights[f"{prefix}router.bias"])  # [R, X]
    chosen = followed(weights, f"{prefix}router.", logits, logits.topk(shape.chosen).indices)
    return Chosen(chosen, logits.gather(1, chosen).softmax(-1))


def expert(weights: Weights, prefix: str, shape: ClampedExperts, number: int, inner: Tensor) -> Tensor:
    """One expert: inner [R, H] -> [R, H]."""
    both = inner @ weights[f"{prefix}gate_up_proj"][number] + weights[f"{prefix}gate_up_proj_bias"][number]  # [R, 2I]
    gate = both[:, ::2].clamp(max=shape.limit)  # [R, I]
    other = both[:, 1::2].clamp(-shape.limit, shape.limit)  # [R, I]
    active = (other + 1) * gate * torch.sigmoid(shape.steepness * gate)  # [R, I]
    return active @ weights[f"{prefix}down_proj"][number] + weights[f"{prefix}down_proj_bias"][number]


def clamped_experts(weights: Weights, prefix: str, shape: ClampedExperts, inner: Tensor) -> Tensor:
    """inner [R, H] -> [R, H]. prefix: of the layer's router and experts."""
    chosen, found = route(weights, prefix, shape, inner), torch.zeros_like(inner)
    for number in range(shape.count):
        rows, rank = (chosen.experts == number).nonzero(as_tuple=True)
        own = expert(weights, f"{prefix}experts.", shape, number, inner[rows])
        found = found.index_add(0, rows, chosen.weight[rows, rank, None] * own)
    return found
