"""Checkpoints of model families that are no Llamas, as SGLang reads them: MiMo-V2 and Step-3.5, and the layers of their drafts.

Called by store.py. The numbers are the recipe's; here are the names that these families give them, and their configurations.
Both families have layers with a sliding window. No case is longer than the windows here, since the reference knows none: what
is served are the hybrid pools of these families with the arithmetic of full attention. Feed-forward layers are dense.
"""

from torch import Tensor

from .recipes import Recipe

Weights = dict[str, Tensor]
Config = dict[str, object]


def mimo_v2(recipe: Recipe, target: Weights, draft: Weights) -> tuple[Config, Weights, Weights]:
    """Configuration of both, and the two checkpoints. Layers have a window or none in turns; each draft layer has one."""
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
        for name, tensor in _of_layer(draft, layer).items():
            renamed[prefix + ("final_layernorm.weight" if name == "norm.weight" else name)] = tensor
    return config, target, renamed


def step3p5(recipe: Recipe, target: Weights, draft: Weights) -> tuple[Config, Weights, Weights]:
    """Likewise. Norms are stored less 1; the layers of the draft are numbered on behind those of the target."""
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
        mine = f"model.layers.{shape.num_layers + layer}."
        for name, tensor in _of_layer(draft, layer).items():
            renamed[mine + ("shared_head.norm.weight" if name == "norm.weight" else name)] = tensor
        renamed[f"{mine}shared_head.head.weight"] = target["lm_head.weight"].clone()
    return config, _less_one(target), _less_one(renamed)


def _of_layer(draft: Weights, layer: int) -> Weights:
    """One layer of the draft; its decoder layer without the number that the reference's head gives it."""
    prefix = f"model.mtp.layers.{layer}."
    mine = {name.removeprefix(prefix): tensor for name, tensor in draft.items() if name.startswith(prefix)}
    return {name.removeprefix("layers.0."): tensor for name, tensor in mine.items()}


def _less_one(weights: Weights) -> Weights:
    """Norms as they are stored where the model adds 1. Near 1 the difference is exact, and so is the sum again."""
    return {name: tensor - 1 if name.endswith("norm.weight") else tensor for name, tensor in weights.items()}
