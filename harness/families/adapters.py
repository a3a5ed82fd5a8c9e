"""The numbers of adapters (LoRA) that a case's requests name, and the models that can have one.

An adapter changes linear maps of the target by their names in a checkpoint. Its numbers are drawn from its seed for each of
them, and its scale is alpha / rank, as PEFT's configurations have it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from eagletwin.harness.core.case import Adapter

from . import RECIPES
from .recipe import Recipe

if TYPE_CHECKING:
    from eagletwin.reference.layers import LowRank

MOST_RANK = 8  # what core/case.py admits
PROJECTIONS = {
    "attention": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    "mlp": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
}
PROJECTIONS["all"] = (*PROJECTIONS["attention"], *PROJECTIONS["mlp"])
_FAMILIES = ("llama", "llama_eagle3", "llama_mtp", "qwen3")
# What an adapter adds to an output, as a share of what inputs of unit size give: enough to change many of the target's tokens
_SHARE = 0.3


def takes_adapters(recipe: Recipe) -> bool:
    """Whether requests of this model may have an adapter: a target of Llama's linear maps, and a draft that SGLang admits."""
    return recipe.family in _FAMILIES


def alpha(adapter: Adapter) -> float:
    """lora_alpha: half of the rank, the rank, or twice as much."""
    return adapter.rank * (0.5, 1.0, 2.0)[adapter.seed % 3]


def modules(adapter: Adapter) -> list[str]:
    """The projections that it changes, as PEFT calls them."""
    return [name.rpartition(".")[2] for name in PROJECTIONS[adapter.on]]


@lru_cache(maxsize=64)
def make_adapter(model: str, adapter: Adapter) -> dict[str, LowRank]:
    """The adapter of this model, in float32: by the name of the weight that it changes."""
    import torch

    from eagletwin.reference.layers import LowRank

    recipe = RECIPES[model]
    shape, generator = recipe.target, torch.Generator().manual_seed(adapter.seed)
    size, inner, heads = shape.hidden_size, recipe.intermediate_size, shape.num_heads * shape.head_dim
    kv = shape.num_kv_heads * shape.head_dim
    sizes = {  # inputs, outputs
        "self_attn.q_proj": (size, heads),
        "self_attn.k_proj": (size, kv),
        "self_attn.v_proj": (size, kv),
        "self_attn.o_proj": (heads, size),
        "mlp.gate_proj": (size, inner),
        "mlp.up_proj": (size, inner),
        "mlp.down_proj": (inner, size),
    }
    scale = alpha(adapter) / adapter.rank
    found = {}
    for layer in range(shape.num_layers):
        for name in PROJECTIONS[adapter.on]:
            inputs, outputs = sizes[name]
            down = torch.randn(adapter.rank, inputs, generator=generator) * inputs**-0.5
            up = torch.randn(outputs, adapter.rank, generator=generator) * (_SHARE / scale * adapter.rank**-0.5)
            found[f"model.layers.{layer}.{name}.weight"] = LowRank(down, up, scale)
    return found


def pad_adapter(adapter: dict[str, LowRank], inner: int) -> dict[str, LowRank]:
    """The same of a model whose MLP has `inner` numbers, of which those behind the model's own are zeros and stay so."""
    from torch.nn.functional import pad

    found = dict(adapter)
    for name, part in adapter.items():
        if ".mlp.down_proj." in name:
            found[name] = replace(part, down=pad(part.down, (0, inner - part.down.shape[1])))
        elif ".mlp." in name:
            found[name] = replace(part, up=pad(part.up, (0, 0, 0, inner - part.up.shape[0])))
    return found
