"""Qwen3-MoE with an EAGLE-3 head: every layer of the target has experts in place of a feed-forward layer; the head has none."""

from dataclasses import replace

from eagletwin.reference.sizes import ExpertShape

from . import eagle3
from .llama import llama_layer
from .recipe import Family, Normal, Part, Recipe, Weights, gated_weights, llama_shape

# Experts are as wide as the head's own feed-forward layer, which is the first one's with noise.
_INNER = 48
_EXPERTS = ExpertShape(count=4, chosen=2, inner=_INNER, affinity="softmax", shared=False)

RECIPES = (
    Recipe(
        name="qwen3-moe-eagle3",
        family="qwen3_moe",
        target=replace(llama_shape(32, 4, 4, 2, 96, aux_layers=(0, 1, 2), qk_norm=True), experts=_EXPERTS),
        draft=llama_shape(32, 1, 2, 2, 96),
        intermediate_size=_INNER,
        seed=123,
        noise=0.08,
        attention_gain=0.08,
        mlp_gain=0.12,
        target_hidden="aux",
        min_share=0.05,
    ),
)


def layer_weights(recipe: Recipe, number: int, normal: Normal) -> Weights:  # noqa: ARG001
    """A decoder layer of the target: a Qwen3's with experts."""
    size = recipe.target.hidden_size
    dense = llama_layer(recipe, recipe.target, normal)
    weights = {name: tensor for name, tensor in dense.items() if not name.startswith("mlp.")}
    # logits of the router of std 1.5: the better expert gets the larger share, and the other one counts
    weights["mlp.gate.weight"] = normal(_EXPERTS.count, size, std=1.5 * size**-0.5)
    for expert in range(_EXPERTS.count):
        weights |= gated_weights(f"mlp.experts.{expert}.", size, _INNER, recipe.mlp_gain, normal)
    return weights


def checkpoint(recipe: Recipe, target: Weights, draft: Weights) -> tuple[Part, Part]:
    """Both as they are. SGLang takes every layer for one of experts, whatever `mlp_only_layers` says."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "num_experts": _EXPERTS.count,
        "num_experts_per_tok": _EXPERTS.chosen,
        "moe_intermediate_size": _EXPERTS.inner,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return Part(config, recipe.target, target), eagle3.draft_part(recipe, draft)


FAMILY = Family(
    name="qwen3_moe",
    recipes=RECIPES,
    draft_weights=eagle3.draft_weights,
    heads=eagle3.heads,
    checkpoint=checkpoint,
    layer_weights=layer_weights,
    modules=("sglang.srt.models.qwen3_moe",),
    dp_attention=True,
    limits=("all layers have experts", "no shared expert"),
)
