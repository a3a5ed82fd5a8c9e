"""Qwen3-Next with its MTP layer: layers that keep a state (gated delta rule) and, every so many, one that attends; experts.

SGLang's own classes serve both. Its loader finds the draft in the target's checkpoint by `mtp`; here it lies in a folder of its
own, by those names.

Conventions, with their outside sources, are in docs/explanation/states.md.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from eagletwin.reference.sizes import DeltaShape, ExpertShape

from .mtp import joined_head, joined_layer
from .recipe import (
    TRACKED_EVERY,
    Family,
    Normal,
    Part,
    Recipe,
    Tensor,
    Weights,
    gated_weights,
    llama_shape,
    state_or_attention_layer,
)

DELTA = DeltaShape(key_heads=2, value_heads=4, key=16, value=16, kernel=4)
_EXPERTS = ExpertShape(count=4, chosen=2, inner=32, affinity="softmax", shared=True)
# A quarter of each head turns, as in Qwen's.
_PLAIN = replace(llama_shape(32, 3, 2, 1, 96, qk_norm=True), head_dim=32, turning=8, gated=True, experts=_EXPERTS)


RECIPES = (
    Recipe(
        name="qwen3-next-nextn",
        family="qwen3_next",
        target=replace(_PLAIN, delta=DELTA, attends_every=3),
        draft=replace(_PLAIN, num_layers=1),
        intermediate_size=48,
        seed=130,
        noise=0.06,
        attention_gain=0.12,
        mlp_gain=0.12,
        min_share=0.05,
        tracked_every=TRACKED_EVERY,
    ),
)


def _experts(recipe: Recipe, normal: Normal) -> Weights:
    """The feed-forward part of every layer."""
    size, inner = recipe.target.hidden_size, _EXPERTS.inner
    weights = {
        # logits of the router of std 1.5: the better expert gets the larger share, and the other one counts
        "mlp.gate.weight": normal(_EXPERTS.count, size, std=1.5 * size**-0.5),
        "mlp.shared_expert_gate.weight": normal(1, size, std=size**-0.5),
    }
    for name in (*(f"experts.{expert}" for expert in range(_EXPERTS.count)), "shared_experts"):
        weights |= gated_weights(f"mlp.{name}.", size, inner, recipe.mlp_gain, normal)
    return weights


def attention(recipe: Recipe, normal: Normal) -> Weights:
    """A layer that attends, with a gate."""
    shape, size = recipe.target, recipe.target.hidden_size
    heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return {
        "self_attn.q_proj.weight": normal(2 * heads, size, std=(1.5 / size) ** 0.5),  # of each head its query, then its gate
        "self_attn.k_proj.weight": normal(kv_heads, size, std=(1.5 / size) ** 0.5),
        "self_attn.v_proj.weight": normal(kv_heads, size, std=size**-0.5),
        "self_attn.q_norm.weight": 1 + normal(shape.head_dim, std=0.1),
        "self_attn.k_norm.weight": 1 + normal(shape.head_dim, std=0.1),
        "self_attn.o_proj.weight": normal(size, heads, std=2 * recipe.attention_gain * heads**-0.5),
    }


def delta_layer(recipe: Recipe, normal: Normal) -> Weights:
    """A layer that keeps a state: half of it is gone after a few positions in some heads, and after a few dozen in others."""
    import torch

    size, delta = recipe.target.hidden_size, recipe.target.delta
    assert delta is not None
    values = delta.value_heads * delta.value
    return {
        "linear_attn.in_proj_qkv.weight": normal(delta.mixed, size, std=size**-0.5),
        "linear_attn.in_proj_z.weight": normal(values, size, std=size**-0.5),
        "linear_attn.in_proj_b.weight": normal(delta.value_heads, size, std=size**-0.5),
        "linear_attn.in_proj_a.weight": normal(delta.value_heads, size, std=size**-0.5),
        "linear_attn.conv1d.weight": normal(delta.mixed, delta.kernel, std=delta.kernel**-0.5),
        "linear_attn.dt_bias": normal(delta.value_heads, std=0.5),
        "linear_attn.A_log": torch.linspace(-4, -1, delta.value_heads) + normal(delta.value_heads, std=0.1),
        "linear_attn.norm.weight": 1 + normal(delta.value, std=0.1),
        "linear_attn.out_proj.weight": normal(size, values, std=2 * recipe.attention_gain * values**-0.5),
    }


OF_HEAD = {
    "eh_proj.weight": "mtp.fc.weight",
    "enorm.weight": "mtp.pre_fc_norm_embedding.weight",
    "hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
    "norm.weight": "mtp.norm.weight",
}


def checkpoint(recipe: Recipe, target: Weights, draft: Weights) -> tuple[Part, Part]:
    """One configuration for both: SGLang gives the draft's model class another name by itself."""
    experts = _EXPERTS
    config = {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        **layers_config(recipe),
        "num_experts": experts.count,
        "num_experts_per_tok": experts.chosen,
        "moe_intermediate_size": experts.inner,
        "shared_expert_intermediate_size": experts.inner,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    renamed = {OF_HEAD.get(name, f"mtp.{name}"): tensor for name, tensor in draft.items()}
    return Part(config, recipe.target, _to_checkpoint(target)), Part(config, recipe.target, _to_checkpoint(renamed))


def layers_config(recipe: Recipe) -> dict[str, Any]:
    """What a configuration says of layers that keep a state and of those that attend."""
    shape, delta = recipe.target, recipe.target.delta
    assert delta is not None
    return {
        "full_attention_interval": shape.attends_every,
        "partial_rotary_factor": shape.turning / shape.head_dim,
        "attn_output_gate": True,
        "linear_conv_kernel_dim": delta.kernel,
        "linear_key_head_dim": delta.key,
        "linear_value_head_dim": delta.value,
        "linear_num_key_heads": delta.key_heads,
        "linear_num_value_heads": delta.value_heads,
    }


def _to_checkpoint(weights: Weights) -> Weights:
    """By the names and in the order of Qwen3-Next's checkpoint: the shared expert has another name, and what a key's head needs
    of each projection lies side by side."""
    found: Weights = {}
    for name, tensor in to_stored_weights(weights).items():
        layer, mark, part = name.partition("linear_attn.in_proj_")
        if not mark:
            found[name.replace("shared_experts.", "shared_expert.")] = tensor
        elif part == "qkv.weight":
            qkv, z, b, a = (weights[f"{layer}linear_attn.in_proj_{of}.weight"] for of in ("qkv", "z", "b", "a"))
            keys = DELTA.key_heads * DELTA.key
            joined = _by_key_head(qkv[:keys], qkv[keys : 2 * keys], qkv[2 * keys :], z)
            found[f"{layer}linear_attn.in_proj_qkvz.weight"] = joined
            found[f"{layer}linear_attn.in_proj_ba.weight"] = _by_key_head(b, a)
    return found


def to_stored_weights(weights: Weights) -> Weights:
    """As Qwen's checkpoints have them: norms less 1, but for that inside a layer with a state; convolutions with a channel."""
    found: Weights = {}
    for name, tensor in weights.items():
        inside = "linear_attn." in name
        if name.endswith("linear_attn.conv1d.weight"):
            found[name] = tensor[:, None].contiguous()
        elif not inside and (name.endswith("norm.weight") or "_norm_" in name):
            found[name] = tensor - 1  # near 1 the difference is exact, and so is the sum again
        else:
            found[name] = tensor
    return found


def _by_key_head(*parts: Tensor) -> Tensor:
    """What a key's head needs of each part, side by side: [.., H] each -> [sum of all, H]."""
    import torch

    split = [part.view(DELTA.key_heads, -1, part.shape[1]) for part in parts]
    return torch.cat(split, 1).flatten(0, 1)


FAMILY = Family(
    name="qwen3_next",
    recipes=RECIPES,
    draft_weights=joined_layer,
    heads=joined_head,
    checkpoint=checkpoint,
    layer_weights=partial(state_or_attention_layer, keeps=delta_layer, attends=attention, feeds=_experts),
    modules=("sglang.srt.models.qwen3_next", "sglang.srt.models.qwen3_next_mtp"),
    norms_less=1,
    environment={"SGLANG_MAMBA_CONV_DTYPE": "float32"},
    dp_attention=True,
    limits=("float32 on one rank", "a context as trained"),
)
