"""Weights of experts as transformers keeps them: of a layer, all in one tensor."""

from collections.abc import Mapping

import torch
from torch import Tensor


def fused(weights: Mapping[str, Tensor], prefix: str, count: int) -> dict[str, Tensor]:
    """The weights, with the `count` experts of the layer `prefix` in two tensors."""
    own = {name: tensor for name, tensor in weights.items() if not name.startswith(f"{prefix}mlp.experts.")}

    def each(name: str) -> list[Tensor]:
        return [weights[f"{prefix}mlp.experts.{expert}.{name}_proj.weight"] for expert in range(count)]

    own[f"{prefix}mlp.experts.gate_up_proj"] = torch.stack(
        [torch.cat(two) for two in zip(each("gate"), each("up"), strict=True)]
    )
    own[f"{prefix}mlp.experts.down_proj"] = torch.stack(each("down"))
    return own
