"""gpt-oss with an EAGLE-3 head: layers with and without a window in turns, attention sinks, biases, experts with clamped gates.

SGLang's own class serves the target. The head is a Llama's, of full attention. Conventions, with their outside sources, are in
docs/explanation/windows.md.
"""

from dataclasses import replace

from eagletwin.reference.sizes import ClampedExperts

from . import eagle3
from .mimo_v2 import ENDING, ENVIRONMENT
from .recipe import Family, Normal, Part, Recipe, Weights, attention_weights, gated_weights, llama_shape

_EXPERTS = ClampedExperts(count=4, chosen=2, inner=32, limit=7.0, steepness=1.702)
_PLAIN = llama_shape(32, 4, 2, 2, 96, aux_layers=(0, 1, 2))

RECIPES = (
    Recipe(
        name="gpt-oss-eagle3",
        family="gpt_oss",
        # layer 0 has a window, unlike MiMo's
        target=replace(_PLAIN, clamped=_EXPERTS, windows=(ENDING + 1, 0) * 2),
        draft=llama_shape(32, 1, 2, 2, 96),
        intermediate_size=_EXPERTS.inner,
        seed=125,
        noise=0.05,
        attention_gain=0.06,
        mlp_gain=0.06,
        target_hidden="aux",
        min_share=0.02,
        window=ENDING,
    ),
)


def layer_weights(recipe: Recipe, number: int, normal: Normal) -> Weights:  # noqa: ARG001
    """A decoder layer of the target. Sinks are numbers of bfloat16, as which SGLang keeps them."""
    import torch

    shape, size, inner, count = recipe.target, recipe.target.hidden_size, _EXPERTS.inner, _EXPERTS.count
    heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return {
        "input_layernorm.weight": 1 + normal(size, std=0.1),
        **attention_weights(shape, recipe.attention_gain, normal),
        **{f"self_attn.{part}_proj.bias": normal(width, std=0.1) for part, width in (("q", heads), ("k", kv_heads))},
        "self_attn.v_proj.bias": normal(kv_heads, std=0.1),
        "self_attn.o_proj.bias": normal(size, std=0.01),
        "self_attn.sinks": (1 + normal(shape.num_heads, std=0.5)).to(torch.bfloat16).float(),
        "post_attention_layernorm.weight": 1 + normal(size, std=0.1),
        "mlp.router.weight": normal(count, size, std=1.5 * size**-0.5),
        "mlp.router.bias": normal(count, std=0.1),
        # some gates reach the limit of 7
        "mlp.experts.gate_up_proj": normal(count, size, 2 * inner, std=3 * size**-0.5),
        "mlp.experts.gate_up_proj_bias": normal(count, 2 * inner, std=0.5),
        "mlp.experts.down_proj": normal(count, inner, size, std=recipe.mlp_gain * inner**-0.5 / 3),
        "mlp.experts.down_proj_bias": normal(count, size, std=0.01),
    }


def draft_weights(recipe: Recipe, target: Weights, normal: Normal) -> Weights:
    """The head of a Llama's pair, whose MLP is the target's last; here there is none, and it is drawn."""
    size, inner = recipe.draft.hidden_size, recipe.intermediate_size
    last = f"model.layers.{recipe.target.num_layers - 1}."
    dense = gated_weights(f"{last}mlp.", size, inner, recipe.mlp_gain, normal)
    return eagle3.draft_weights(recipe, target | dense, normal)


def checkpoint(recipe: Recipe, target: Weights, draft: Weights) -> tuple[Part, Part]:
    """The target's configuration as OpenAI has it, with a rotary embedding as trained; the head's is a Llama's."""
    shape = recipe.target
    _, head = eagle3.checkpoint(recipe, target, draft)
    config = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_local_experts": _EXPERTS.count,
        "num_experts_per_tok": _EXPERTS.chosen,
        "swiglu_limit": _EXPERTS.limit,
        "hidden_act_alpha": _EXPERTS.steepness,
        "attention_bias": True,
        "sliding_window": recipe.window + 1,
        "layer_types": [("full_attention", "sliding_attention")[window > 0] for window in shape.windows],
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
    }
    return Part(config, shape, target), head


FAMILY = Family(
    name="gpt_oss",
    recipes=RECIPES,
    draft_weights=draft_weights,
    heads=eagle3.heads,
    checkpoint=checkpoint,
    layer_weights=layer_weights,
    modules=("sglang.srt.models.gpt_oss",),
    environment=ENVIRONMENT,
    names_type=True,
    dp_attention=True,
    limits=("no MXFP4", "a context as trained: no YaRN"),
)
