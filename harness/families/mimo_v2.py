"""MiMo-V2: every second layer has a sliding window, each layer of its draft has one."""

from .recipe import Family, Part, Recipe, Weights, llama_shape
from .windows import ENVIRONMENT, LIMITS, both_windows, draft_weights, heads, served_layer

RECIPES = both_windows(
    Recipe(
        name="mimo-v2",
        family="mimo_v2",
        target=llama_shape(32, 2, 2, 2, 96),
        draft=llama_shape(32, 1, 2, 2, 96),
        intermediate_size=48,
        seed=71,
        noise=0.09,
        attention_gain=0.2,
        mlp_gain=0.2,
        min_share=0.05,
        mtp_layers=4,
    ),
    ending_share=0.02,
)


def checkpoint(recipe: Recipe, target: Weights, draft: Weights) -> tuple[Part, Part]:
    """SGLang makes the draft's configuration of the target's. Every second layer has a window, and so has each draft layer."""
    shape = recipe.target
    config = {
        "architectures": ["MiMoV2FlashForCausalLM"],
        "layernorm_epsilon": shape.rms_norm_eps,
        "hybrid_layer_pattern": [layer % 2 for layer in range(shape.num_layers)],
        "moe_layer_freq": [0] * shape.num_layers,
        "n_routed_experts": 1,
        "attention_bias": False,
        "partial_rotary_factor": 1.0,
        "sliding_window_size": recipe.window,
        "sliding_window": recipe.window,
        "v_head_dim": shape.head_dim,
        "swa_num_attention_heads": shape.num_heads,
        "swa_num_key_value_heads": shape.num_kv_heads,
        "swa_head_dim": shape.head_dim,
        "swa_v_head_dim": shape.head_dim,
        "encoder_only": False,
        "num_nextn_predict_layers": recipe.mtp_layers,
    }
    renamed = {}
    for layer in range(recipe.mtp_layers):
        prefix = f"model.mtp.layers.{layer}."
        for name, tensor in served_layer(draft, layer).items():
            renamed[prefix + ("final_layernorm.weight" if name == "norm.weight" else name)] = tensor
    return Part(config, shape, target), Part(config, shape, renamed)


FAMILY = Family(
    name="mimo_v2",
    recipes=RECIPES,
    draft_weights=draft_weights,
    heads=heads,
    checkpoint=checkpoint,
    modules=("sglang.srt.models.mimo_v2", "sglang.srt.models.mimo_v2_nextn"),
    environment=ENVIRONMENT,
    dp_attention=True,
    limits=(*LIMITS, "values without a scale"),
)
