"""DeepSeek-V3 with its NextN layer: latent attention, one dense layer and one of experts, and a draft layer of experts.

SGLang's own classes serve both. Its loader finds the draft in the target's checkpoint by the number behind the target's last
layer; here it lies in a folder of its own, under that number.

Conventions, with their outside sources, are in docs/explanation/latent-attention.md.
"""

from dataclasses import replace
from math import log

from eagletwin.reference.sizes import ExpertShape, LatentShape, LlamaShape, RopeScaling

from .mtp import joined_head, joined_layer
from .recipe import Family, Normal, Part, Recipe, Weights, gated_weights, llama_shape

# A latent of 512 and a turning part of 64 are what SGLang's attention kernels choose their blocks for; the rest is small.
_LATENT = LatentShape(query_rank=32, rank=512, rope=64, plain=32, value=32)
DENSE = 1  # layers before those of experts
_EXPERTS = ExpertShape(count=8, chosen=2, inner=32, affinity="sigmoid", shared=True, groups=4, kept=2, scale=1.5)


# Sizes that the kernels of bfloat16 take on a GPU: SGLang's joined norms take states of 512 and more, FlashAttention heads as
# wide as DeepSeek-V3's own. All experts are chosen, so that no choice of one is a tie, which nobody would see in a graph.
_WIDE = LatentShape(query_rank=128, rank=512, rope=64, plain=128, value=128)
_ALL = ExpertShape(count=2, chosen=2, inner=32, affinity="sigmoid", shared=True, groups=1, kept=1, scale=1.5)


def _shape(num_layers: int, hidden: int = 64, latent: LatentShape = _LATENT, experts: ExpertShape = _EXPERTS) -> LlamaShape:
    plain = llama_shape(hidden, num_layers, 2, 1, 96)
    return replace(plain, head_dim=latent.width, latent=latent, experts=experts)


# DeepSeek-V3's own factors, after a training on 128 positions: what is turned more slowly shows in short texts.
_FACTOR, _ORIGINAL, _ALL_DIM = 40.0, 128, 1.0
_LENGTHENED = RopeScaling(
    kind="yarn", factor=_FACTOR, original=_ORIGINAL, temperature=(0.1 * _ALL_DIM * log(_FACTOR) + 1) ** -2
)


def _recipe(name: str, seed: int, min_share: float, scaling: RopeScaling | None = None) -> Recipe:
    return Recipe(
        name=name,
        family="deepseek",
        target=replace(_shape(2), rope_scaling=scaling),
        draft=replace(_shape(1), rope_scaling=scaling),
        intermediate_size=96,
        seed=seed,
        noise=0.06,
        attention_gain=0.25,
        mlp_gain=0.2,
        min_share=min_share,
    )


_NEXTN = _recipe("deepseek-nextn", 95, 0.04)
RECIPES = (
    _NEXTN,
    _recipe("deepseek-nextn-yarn", 95, 0.02, _LENGTHENED),
    replace(
        _NEXTN,
        name="deepseek-nextn-wide",
        target=_shape(2, 512, _WIDE, _ALL),
        draft=_shape(1, 512, _WIDE, _ALL),
        min_share=0.015,
    ),
)


def parts_of(shape: LlamaShape) -> tuple[LatentShape, ExpertShape]:
    """Sizes of its attention and of its experts."""
    if shape.latent is None or shape.experts is None:
        raise ValueError("a target of this family has latent attention and experts")
    return shape.latent, shape.experts


def layer_weights(recipe: Recipe, number: int, normal: Normal) -> Weights:
    """A decoder layer of the target: the first one is dense, those behind it have experts."""
    import torch

    size, heads = recipe.target.hidden_size, recipe.target.num_heads
    latent, experts = parts_of(recipe.target)
    # rows of each head's keys, whose scores have std 1.5, as a Llama's here, and of its values
    per_head = (latent.plain, (1.5 / latent.rank) ** 0.5), (latent.value, latent.rank**-0.5)
    made = [normal(width, latent.rank, std=std) for _ in range(heads) for width, std in per_head]
    weights = {
        "input_layernorm.weight": 1 + normal(size, std=0.1),
        "self_attn.q_a_proj.weight": normal(latent.query_rank, size, std=size**-0.5),
        "self_attn.q_a_layernorm.weight": 1 + normal(latent.query_rank, std=0.1),
        "self_attn.q_b_proj.weight": normal(
            heads * (latent.plain + latent.rope), latent.query_rank, std=(1.5 / latent.query_rank) ** 0.5
        ),
        "self_attn.kv_a_proj_with_mqa.weight": normal(latent.width, size, std=(1.5 / size) ** 0.5),
        "self_attn.kv_a_layernorm.weight": 1 + normal(latent.rank, std=0.1),
        "self_attn.kv_b_proj.weight": torch.cat(made),
        "self_attn.o_proj.weight": normal(
            size, heads * latent.value, std=recipe.attention_gain * (heads * latent.value) ** -0.5
        ),
        "post_attention_layernorm.weight": 1 + normal(size, std=0.1),
    }
    if number < DENSE:
        return weights | gated_weights("mlp.", size, recipe.intermediate_size, recipe.mlp_gain, normal)
    weights["mlp.gate.weight"] = normal(experts.count, size, std=1.5 * size**-0.5)
    weights["mlp.gate.e_score_correction_bias"] = normal(experts.count, std=0.1).abs()
    for expert in range(experts.count):
        weights |= gated_weights(f"mlp.experts.{expert}.", size, experts.inner, recipe.mlp_gain, normal)
    return weights | gated_weights("mlp.shared_experts.", size, experts.inner, recipe.mlp_gain, normal)


def target_config(shape: LlamaShape) -> dict[str, object]:
    """What the configuration of a target has beside a Llama's."""
    _, experts = parts_of(shape)
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **latent_config(shape),
        "first_k_dense_replace": DENSE,
        "moe_layer_freq": 1,
        "moe_intermediate_size": experts.inner,
        "n_routed_experts": experts.count,
        "n_shared_experts": 1,
        "n_group": experts.groups,
        "topk_group": experts.kept,
        "num_experts_per_tok": experts.chosen,
        "routed_scaling_factor": experts.scale,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


def latent_config(shape: LlamaShape) -> dict[str, object]:
    latent, _ = parts_of(shape)
    return {
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.rank,
        "qk_rope_head_dim": latent.rope,
        "qk_nope_head_dim": latent.plain,
        "v_head_dim": latent.value,
        "head_dim": latent.rope,
        "num_key_value_heads": shape.num_heads,
        "rope_interleave": True,
        **({} if shape.rope_scaling is None else {"rope_scaling": _rope_config(shape.rope_scaling)}),
    }


def _rope_config(scaling: RopeScaling) -> dict[str, object]:
    """A lengthened context as DeepSeek-V3's configuration has it. The amplitude is `mscale` over `mscale_all_dim`: 1."""
    return {
        "type": "yarn",
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original,
        "beta_fast": scaling.often,
        "beta_slow": scaling.seldom,
        "mscale": _ALL_DIM,
        "mscale_all_dim": _ALL_DIM,
    }


def checkpoint(recipe: Recipe, target: Weights, draft: Weights) -> tuple[Part, Part]:
    """One configuration for both: SGLang gives the draft's model class another name by itself."""
    shape = recipe.target
    config = target_config(shape) | {"num_nextn_predict_layers": 1}
    prefix, renamed = f"model.layers.{shape.num_layers}.", {}
    for name, tensor in draft.items():
        served = "shared_head.norm.weight" if name == "norm.weight" else name.removeprefix("layers.0.")
        renamed[prefix + served] = tensor
    return Part(config, shape, target), Part(config, shape, renamed)


FAMILY = Family(
    name="deepseek",
    recipes=RECIPES,
    draft_weights=joined_layer,
    heads=joined_head,
    checkpoint=checkpoint,
    layer_weights=layer_weights,
    modules=("sglang.srt.models.deepseek_v2", "sglang.srt.models.deepseek_nextn"),
    stored="latent rows",
    dp_attention=True,
    limits=("no FP8", "routed and shared experts are not fused"),
)
