"""Qwen3 with an EAGLE-3 head: queries and keys of the target are normed, and heads vary in their norms and in their layers.

The head is that of eagle3.py, as SGLang serves it to any target: a Llama's, without norms of queries and keys. Conventions,
with their outside sources, are in docs/explanation/eagle3-heads.md.
"""

from typing import Any

from . import eagle3
from .recipe import Family, Part, Recipe, Weights, llama_shape


def _recipe(name: str, seed: int, min_share: float, *, draft_layers: int = 1, **others: Any) -> Recipe:
    return Recipe(
        name=name,
        family="qwen3",
        target=llama_shape(32, 4, 4, 2, 96, aux_layers=(0, 1, 2), qk_norm=True),
        draft=llama_shape(32, draft_layers, 2, 2, 96),
        intermediate_size=48,
        seed=seed,
        noise=0.08,
        attention_gain=0.08,
        mlp_gain=0.08,
        target_hidden="aux",
        min_share=min_share,
        **others,
    )


RECIPES = (
    _recipe("qwen3-eagle3", 103, 0.06),
    _recipe("qwen3-eagle3.1", 108, 0.04, draft_vocab_size=64, head_norms=("fc_norm", "norm_output")),
    _recipe("qwen3-eagle3-norm", 122, 0.06, head_norms=("norm_before_fc",)),
    _recipe("qwen3-eagle3-deep", 127, 0.08, draft_layers=2),
)


def checkpoint(recipe: Recipe, target: Weights, draft: Weights) -> tuple[Part, Part]:
    """Both as they are."""
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False}
    return Part(config, recipe.target, target), eagle3.draft_part(recipe, draft)


FAMILY = Family(
    name="qwen3",
    recipes=RECIPES,
    draft_weights=eagle3.draft_weights,
    heads=eagle3.heads,
    checkpoint=checkpoint,
    modules=("sglang.srt.models.qwen3",),
    dp_attention=True,
)
