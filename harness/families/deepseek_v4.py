"""DeepSeek-V4 with its MTP layer: several residual streams, a window, and compressed rows of ratio 4 and 128.

SGLang's own classes serve both, on its backend for this model. Most sizes are those that its kernels are written for: 64 heads
of 512, pages of 256, 64 index heads of 128, of compressed rows 512 chosen. They know bfloat16 alone, and store FP8.

The target's last layer compresses nothing, as the draft's does not, so that the draft can be made of it. Of the layers' experts
the first layer's are those that a table names for each token; a bias decides those of all others: in a CUDA graph nobody sees
which were chosen, and within the bound of bfloat16 many choices would tie.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from eagletwin.reference.sizes import CompressedShape, ExpertShape, RopeScaling

from .recipe import Family, Part, Recipe, gated_weights, llama_shape, noisy

if TYPE_CHECKING:
    from torch import Tensor

    from eagletwin.reference.eagle import Head

    from .recipe import Normal, Weights

PAGE = 256  # of the backend
WINDOW = 128
HASHED = 1  # layers whose experts a table names
_HEADS, _WIDTH = 64, 512
_RATIOS = (4, 128, 0)
_SIZES = CompressedShape(
    ratios=_RATIOS,
    query_rank=64,
    rope=64,
    groups=8,
    group_rank=32,
    window=WINDOW,
    index_heads=64,
    index_width=128,
    chosen=512,
    streams=4,
    sinkhorn=20,
    stream_eps=1e-6,
    window_theta=10000.0,
    theta=160000.0,
    scaling=RopeScaling(kind="yarn", factor=16.0, original=256),
)
_EXPERTS = ExpertShape(count=8, chosen=2, inner=64, affinity="root_softplus", shared=True, scale=1.5, limit=10.0, settled=True)
_SETTLES = 8.0  # a bias that no affinity outweighs: roots of softplus of logits of some 1.5
MOST_ROWS = 4 * _SIZES.chosen  # of a text: no compressed row is left out


def _shape(ratios: tuple[int, ...]) -> Any:
    plain = llama_shape(512, len(ratios), _HEADS, 1, 96)
    return replace(plain, head_dim=_WIDTH, experts=_EXPERTS, compressed=replace(_SIZES, ratios=ratios))


RECIPES = (
    Recipe(
        name="deepseek-v4",
        family="deepseek_v4",
        target=_shape(_RATIOS),
        draft=_shape((0,)),
        intermediate_size=64,
        seed=41,
        noise=0.06,
        attention_gain=0.25,
        mlp_gain=0.2,
        target_hidden="pre_norm",
        min_share=0.02,
        window=WINDOW - 1,
        page=PAGE,
    ),
)


def _in_bfloat16(weights: Weights) -> Weights:
    """What SGLang keeps in either type is the same number then."""
    return {name: weight.bfloat16().float() if weight.is_floating_point() else weight for name, weight in weights.items()}


def layer_weights(recipe: Recipe, number: int, normal: Normal) -> Weights:
    """A layer of the target, by the names of the reference."""
    import torch

    sizes, size, experts = _SIZES, recipe.target.hidden_size, _EXPERTS
    ratio, rank, low = sizes.ratios[number], sizes.query_rank, sizes.groups * sizes.group_rank
    weights: Weights = {}
    for part in ("attn_hc", "ffn_hc"):
        weights |= _stream_weights(f"{part}.", (2 + sizes.streams) * sizes.streams, 3, size, normal)
    weights |= {
        "input_layernorm.weight": 1 + normal(size, std=0.1),
        "post_attention_layernorm.weight": 1 + normal(size, std=0.1),
        "self_attn.q_a_proj.weight": normal(rank, size, std=size**-0.5),
        "self_attn.q_a_layernorm.weight": 1 + normal(rank, std=0.1),
        "self_attn.q_b_proj.weight": normal(_HEADS * _WIDTH, rank, std=rank**-0.5),
        "self_attn.kv_proj.weight": normal(_WIDTH, size, std=size**-0.5),
        "self_attn.kv_norm.weight": 1 + normal(_WIDTH, std=0.1),
        "self_attn.o_a_proj.weight": normal(
            low, _HEADS * _WIDTH // sizes.groups, std=(_HEADS * _WIDTH // sizes.groups) ** -0.5
        ),
        "self_attn.o_b_proj.weight": normal(size, low, std=recipe.attention_gain * low**-0.5),
        "self_attn.sinks": normal(_HEADS, std=0.5),
    }
    if ratio:
        weights |= _compressor_weights("self_attn.compressor.", ratio, _WIDTH, size, normal)
    if ratio == 4:
        heads = sizes.index_heads
        weights["self_attn.indexer.q_b_proj.weight"] = normal(heads * sizes.index_width, rank, std=rank**-0.5)
        weights["self_attn.indexer.weights_proj.weight"] = normal(heads, size, std=size**-0.5)
        weights |= _compressor_weights("self_attn.indexer.compressor.", ratio, sizes.index_width, size, normal)
    weights["mlp.gate.weight"] = normal(experts.count, size, std=1.5 * size**-0.5)
    order = torch.stack([normal(experts.count, std=1.0).argsort() for _ in range(recipe.target.vocab_size)])
    if number < HASHED:
        weights["mlp.gate.tid2eid"] = order[:, : experts.chosen].int()
    else:
        bias = normal(experts.count, std=0.1).abs()
        weights["mlp.gate.e_score_correction_bias"] = bias.index_add(
            0, order[0, : experts.chosen], bias.new_full((2,), _SETTLES)
        )
    for expert in range(experts.count):
        weights |= gated_weights(f"mlp.experts.{expert}.", size, experts.inner, recipe.mlp_gain, normal)
    return _in_bfloat16(weights | gated_weights("mlp.shared_experts.", size, experts.inner, recipe.mlp_gain, normal))


def _stream_weights(prefix: str, made: int, scales: int, size: int, normal: Normal) -> Weights:
    return {
        f"{prefix}fn": normal(made, _SIZES.streams * size, std=(_SIZES.streams * size) ** -0.5),
        f"{prefix}base": normal(made, std=0.5),
        f"{prefix}scale": 1 + normal(scales, std=0.1),
    }


def _compressor_weights(prefix: str, ratio: int, width: int, size: int, normal: Normal) -> Weights:
    series = 2 if ratio == 4 else 1
    return {
        f"{prefix}kv_proj.weight": normal(series * width, size, std=(1.5 / size) ** 0.5),
        f"{prefix}gate_proj.weight": normal(series * width, size, std=size**-0.5),
        f"{prefix}position_bias": normal(ratio, series * width, std=0.5),
        f"{prefix}kv_norm.weight": 1 + normal(width, std=0.1),
    }


def draft_weights(recipe: Recipe, target: Weights, normal: Normal) -> Weights:
    """The target's last layer and what follows it, with noise, behind projections that take the embedding."""
    import torch

    size, last = recipe.target.hidden_size, f"model.layers.{recipe.target.num_layers - 1}."
    target |= _in_bfloat16(_stream_weights("model.hc_head.", _SIZES.streams, 1, size, normal))
    of_layer = {name.replace(last, "layers.0."): tensor for name, tensor in target.items() if name.startswith(last)}
    of_head = {name.removeprefix("model."): target[name] for name in target if name.startswith("model.hc_head.")}
    kept = ("hc_head.scale", "layers.0.mlp.gate.e_score_correction_bias")  # one number; and what settles a choice
    draft = {
        name: tensor.clone() if name in kept else noisy(recipe, tensor, normal) for name, tensor in (of_layer | of_head).items()
    }
    draft |= {name: 1 + normal(size, std=recipe.noise) for name in ("enorm.weight", "hnorm.weight")}
    draft["e_proj.weight"] = torch.eye(size) + normal(size, size, std=recipe.noise * size**-0.5)
    draft["h_proj.weight"] = normal(size, size, std=recipe.noise * size**-0.5)
    draft["norm.weight"] = noisy(recipe, target["model.norm.weight"], normal)
    return _in_bfloat16(draft)


def heads(recipe: Recipe, draft: Weights, embedding: Tensor, lm_head: Tensor, proposes: Tensor) -> tuple[Head, ...]:  # noqa: ARG001
    """The one layer."""
    from eagletwin.reference.streams_head import StreamsHead

    return (StreamsHead(draft, recipe.draft, embedding, lm_head),)


# The names of the published checkpoint, by those of the reference.
_NAMES = (
    ("model.embed_tokens.", "embed."),
    ("lm_head.", "head."),
    ("model.", ""),
    ("attn_hc.", "hc_attn_"),
    ("ffn_hc.", "hc_ffn_"),
    ("hc_head.", "hc_head_"),
    ("input_layernorm.", "attn_norm."),
    ("post_attention_layernorm.", "ffn_norm."),
    ("self_attn.indexer.q_b_proj.", "attn.indexer.wq_b."),
    ("self_attn.", "attn."),
    ("q_a_proj.", "wq_a."),
    ("q_a_layernorm.", "q_norm."),
    ("q_b_proj.", "wq_b."),
    ("compressor.kv_norm.", "compressor.norm."),
    ("kv_proj.", "wkv."),
    ("o_a_proj.", "wo_a."),
    ("o_b_proj.", "wo_b."),
    ("sinks", "attn_sink"),
    ("compressor.gate_proj.", "compressor.wgate."),
    ("position_bias", "ape"),
    ("mlp.", "ffn."),
    ("e_score_correction_bias", "bias"),
    ("gate_proj.", "w1."),
    ("up_proj.", "w3."),
    ("down_proj.", "w2."),
)


def published(name: str) -> str:
    """What the published checkpoint calls this weight."""
    for ours, theirs in _NAMES:
        name = name.replace(ours, theirs)
    return name


def checkpoint(recipe: Recipe, target: Weights, draft: Weights) -> tuple[Part, Part]:
    """One configuration for both: SGLang gives the draft's model class another name by itself."""
    sizes, experts = _SIZES, _EXPERTS
    config = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "torch_dtype": "bfloat16",
        "qk_rope_head_dim": sizes.rope,
        "q_lora_rank": sizes.query_rank,
        "o_groups": sizes.groups,
        "o_lora_rank": sizes.group_rank,
        "sliding_window": sizes.window,
        "compress_ratios": [*sizes.ratios, 0],
        "compress_rope_theta": sizes.theta,
        "rope_theta": sizes.window_theta,
        "rope_scaling": {
            "type": "yarn",
            "rope_type": "yarn",
            "factor": sizes.scaling.factor,
            "original_max_position_embeddings": sizes.scaling.original,
            "beta_fast": sizes.scaling.often,
            "beta_slow": sizes.scaling.seldom,
        },
        "index_n_heads": sizes.index_heads,
        "index_head_dim": sizes.index_width,
        "index_topk": sizes.chosen,
        "n_routed_experts": experts.count,
        "n_shared_experts": 1,
        "num_experts_per_tok": experts.chosen,
        "moe_intermediate_size": experts.inner,
        "num_hash_layers": HASHED,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": experts.scale,
        "n_group": 1,
        "topk_group": 1,
        "swiglu_limit": experts.limit,
        "hc_mult": sizes.streams,
        "hc_sinkhorn_iters": sizes.sinkhorn,
        "hc_eps": sizes.stream_eps,
        "num_nextn_predict_layers": 1,
        "first_k_dense_replace": 0,
        "moe_layer_freq": 1,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
    }
    served = {published(name): tensor for name, tensor in target.items()}
    drafts = {f"mtp.0.{published(name.removeprefix('layers.0.'))}": tensor for name, tensor in draft.items()}
    return Part(config, recipe.target, served), Part(config, recipe.target, drafts)


FAMILY = Family(
    name="deepseek_v4",
    recipes=RECIPES,
    asked_for=True,  # dsv4-draft-reads
    draft_weights=draft_weights,
    heads=heads,
    checkpoint=checkpoint,
    environment=MappingProxyType(
        {
            "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH": "1",
            "SGLANG_OPT_USE_TILELANG_MHC_PRE": "0",
            "SGLANG_OPT_USE_TILELANG_MHC_POST": "0",
            "SGLANG_OPT_DEEPGEMM_HC_PRENORM": "0",
            "SGLANG_OPT_FUSE_MHC_POST_PRE": "0",
            "SGLANG_SWA_EVICTION_INTERVAL": "1",
        }
    ),
    layer_weights=layer_weights,
    modules=("sglang.srt.models.deepseek_v4", "sglang.srt.models.deepseek_v4_nextn"),
    stored="latent rows",
    limits=(
        "bfloat16 and FP8 alone",
        "no compressed row is left out: texts of less than 2,048 rows",
        "biases settle which experts a scored layer takes",
        "no layer of ratio 1 or 2",
    ),
)
