"""Step-3.5: every second layer has a sliding window; queries and keys are normalized; the draft's layers are chained."""

from .mimo_v2 import ENVIRONMENT, LIMITS, both_windows, draft_weights, heads, served_layer
from .recipe import Family, Part, Recipe, Weights, llama_shape

RECIPES = both_windows(
    Recipe(
        name="step-3.5",
        family="step3p5",
        # its draft layer takes itself for number 45 of the target, whatever the target is, and attends as number 45 - n
        target=llama_shape(32, 45, 2, 2, 96, pre_norm=True, qk_norm=True),
        draft=llama_shape(32, 1, 2, 2, 96, qk_norm=True),
        intermediate_size=48,
        seed=72,
        noise=0.09,
        attention_gain=0.04,
        mlp_gain=0.04,
        target_hidden="pre_norm",
        min_share=0.05,
        mtp_layers=4,
        chained=True,
    ),
    ending_share=0.05,
)


def checkpoint(recipe: Recipe, target: Weights, draft: Weights) -> tuple[Part, Part]:
    """SGLang makes the draft's configuration of the target's. Norms are stored less 1; the draft's layers have the numbers that
    follow those of the target."""
    shape, layers = recipe.target, recipe.target.num_layers + recipe.mtp_layers
    config = {
        "architectures": ["Step3p5ForCausalLM"],
        "model_type": "step3p5",
        "num_attention_groups": shape.num_kv_heads,
        "max_seq_len": recipe.max_position,
        "moe_layers_enum": str(layers),  # none of them
        "moe_num_experts": 1,
        "layer_types": [("full_attention", "sliding_attention")[layer % 2] for layer in range(layers)],
        "sliding_window": recipe.window,
        "attention_other_setting": {"num_attention_heads": shape.num_heads, "num_attention_groups": shape.num_kv_heads},
        "use_head_wise_attn_gate": False,
        "rope_theta": [shape.rope_theta] * layers,
        "partial_rotary_factors": [1.0] * layers,
        "swiglu_limits_shared": [0.0] * layers,
        "num_nextn_predict_layers": recipe.mtp_layers,
    }
    renamed = {"model.embed_tokens.weight": target["model.embed_tokens.weight"]}
    for layer in range(recipe.mtp_layers):
        prefix = f"model.layers.{shape.num_layers + layer}."
        for name, tensor in served_layer(draft, layer).items():
            renamed[prefix + ("shared_head.norm.weight" if name == "norm.weight" else name)] = tensor
        renamed[f"{prefix}shared_head.head.weight"] = target["lm_head.weight"].clone()
    return Part(config, shape, _less_one(target)), Part(config, shape, _less_one(renamed))


def _less_one(weights: Weights) -> Weights:
    """Norms as they are stored where the model adds 1. Near 1 the difference is exact, and so is the sum again."""
    return {name: tensor - 1 if name.endswith("norm.weight") else tensor for name, tensor in weights.items()}


FAMILY = Family(
    name="step3p5",
    recipes=RECIPES,
    draft_weights=draft_weights,
    heads=heads,
    checkpoint=checkpoint,
    modules=("sglang.srt.models.step3p5", "sglang.srt.models.step3p5_mtp"),
    norms_less=1,
    environment=ENVIRONMENT,
    limits=(*LIMITS, "no gates of heads"),
)
