"""MiMo-7B: a Qwen2 with one layer of MTP, which drafts on by itself.

The layer is that of reference/draft_heads.py; its projection takes the hidden state first, and the embedding after it. Queries,
keys and values have biases in Qwen2; here they are zero. The target hands over its residual sum, before the last norm, as both
engines do; the layer hands on its normed state.

Both engines make the embedding of row 0 zero (docs/guide/vllm.md), so no case of the family is equal as released.
"""

from .mtp import joined_head, joined_layer
from .recipe import Family, Part, Recipe, Weights, llama_shape

RECIPES = (
    Recipe(
        name="mimo",
        family="mimo",
        target=llama_shape(32, 1, 2, 2, 96, pre_norm=True),
        draft=llama_shape(32, 1, 2, 2, 96),
        intermediate_size=48,
        seed=142,
        noise=0.09,
        attention_gain=0.6,
        mlp_gain=0.6,
        target_hidden="pre_norm",
        min_share=0.08,
    ),
)

_NAMES = {
    "enorm.weight": "token_layernorm.weight",
    "hnorm.weight": "hidden_layernorm.weight",
    "eh_proj.weight": "input_proj.weight",
    "norm.weight": "final_layernorm.weight",
}


def _with_biases(weights: Weights) -> Weights:
    """The same with a bias of zeros for each projection of Qwen2's attention that has one."""
    import torch

    biased = [name for name in weights if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]
    return weights | {name.replace("weight", "bias"): torch.zeros(len(weights[name])) for name in biased}


def checkpoint(recipe: Recipe, target: Weights, draft: Weights) -> tuple[Part, Part]:
    """One configuration for both, as of one checkpoint: the engine finds the draft's layer by `num_nextn_predict_layers`."""
    import torch

    config = {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1}
    embedding, state = draft["eh_proj.weight"].chunk(2, 1)
    ordered = draft | {"eh_proj.weight": torch.cat([state, embedding], 1)}
    prefix = "model.mtp_layers.0."
    renamed = {prefix + _NAMES.get(name, name.removeprefix("layers.0.")): tensor for name, tensor in ordered.items()}
    shared = {name: target[name] for name in ("model.embed_tokens.weight", "lm_head.weight")}
    return (Part(config, recipe.target, _with_biases(target)), Part(config, recipe.draft, _with_biases(renamed) | shared))


FAMILY = Family(
    name="mimo",
    recipes=RECIPES,
    draft_weights=joined_layer,
    heads=joined_head,
    checkpoint=checkpoint,
    asked_for=True,
    vllm_method="mtp",
    not_on_sglang="its class makes the embedding of row 0 zero too (mimo_mtp.py), and no entry has it yet",
)
