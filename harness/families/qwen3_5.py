"""Qwen3.5 (text) with its MTP layer: the layers of Qwen3-Next with their projections apart, and no experts.

The class is the one for text alone. In the checkpoint each projection of a layer with a state has a tensor of its own, where
Qwen3-Next joins them by heads; SGLang has another class, another loader and another kernel for that (`qwen3_5.py`,
`fused_qkvzba_split_reshape_cat_contiguous`). What is computed is the same.

Conventions, with their outside sources, are in docs/explanation/states.md.
"""

from dataclasses import replace
from functools import partial

from .mtp import joined_head, joined_layer
from .qwen3_next import DELTA, OF_HEAD, attention, delta_layer, layers_config, to_stored_weights
from .recipe import TRACKED_EVERY, Family, Normal, Part, Recipe, Weights, gated_weights, llama_shape, state_or_attention_layer

_PLAIN = replace(llama_shape(32, 3, 2, 1, 96, qk_norm=True), head_dim=32, turning=8, gated=True)

RECIPES = (
    Recipe(
        name="qwen3.5-nextn",
        family="qwen3_5",
        target=replace(_PLAIN, delta=DELTA, attends_every=3),
        draft=replace(_PLAIN, num_layers=1),
        intermediate_size=48,
        seed=191,
        noise=0.06,
        attention_gain=0.12,
        mlp_gain=0.12,
        min_share=0.02,
        tracked_every=TRACKED_EVERY,
    ),
)


def _feed_forward(recipe: Recipe, normal: Normal) -> Weights:
    return gated_weights("mlp.", recipe.target.hidden_size, recipe.intermediate_size, recipe.mlp_gain, normal)


def checkpoint(recipe: Recipe, target: Weights, draft: Weights) -> tuple[Part, Part]:
    """One configuration for both: SGLang gives the draft's model class another name by itself."""
    shape = recipe.target
    config = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        **layers_config(recipe),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": shape.rope_theta,
            "partial_rotary_factor": shape.turning / shape.head_dim,
        },
    }
    renamed = {OF_HEAD.get(name, f"mtp.{name}"): tensor for name, tensor in draft.items()}
    return Part(config, shape, to_stored_weights(target)), Part(config, shape, to_stored_weights(renamed))


FAMILY = Family(
    name="qwen3_5",
    recipes=RECIPES,
    draft_weights=joined_layer,
    heads=joined_head,
    checkpoint=checkpoint,
    layer_weights=partial(state_or_attention_layer, keeps=delta_layer, attends=attention, feeds=_feed_forward),
    modules=("sglang.srt.models.qwen3_5_text", "sglang.srt.models.qwen3_5_mtp"),
    norms_less=1,
    environment={"SGLANG_MAMBA_CONV_DTYPE": "float32"},
    dp_attention=True,
    limits=("float32 on one rank", "a context as trained"),
)
