"""Nemotron-H with its MTP layer: layers that keep a state (Mamba-2) and, every so many, one that attends; ungated experts.

A layer of ours is two of a checkpoint's: what mixes rows, and the experts behind it, each with its norm. The draft is two such,
too. SGLang's own classes serve both. Its loader finds the draft in the target's checkpoint by `mtp`; here it lies in a folder
of its own, by those names.

Conventions, with their outside sources, are in docs/explanation/states.md.
"""

from dataclasses import replace
from functools import partial

from eagletwin.reference.sizes import ExpertShape, ScanShape

from .mtp import joined_head, joined_layer
from .recipe import Family, Normal, Part, Recipe, Weights, attention_weights, llama_shape, state_or_attention_layer

_SCAN = ScanShape(heads=4, width=16, groups=2, state=16, kernel=4)
_EXPERTS = ExpertShape(count=4, chosen=2, inner=32, affinity="sigmoid", shared=True)
_PLAIN = replace(llama_shape(32, 3, 2, 1, 96), rope_theta=0.0, experts=_EXPERTS)  # heads do not turn
# Positions of a chunk of SGLang's prefill kernels: short prompts have several, and a request begins within one
CHUNK = 16


RECIPES = (
    Recipe(
        name="nemotron-h-nextn",
        family="nemotron_h",
        target=replace(_PLAIN, scan=_SCAN, attends_every=3),
        draft=replace(_PLAIN, num_layers=1),
        intermediate_size=32,
        seed=173,
        noise=0.05,
        attention_gain=0.12,
        mlp_gain=0.12,
        min_share=0.02,
        tracked_every=CHUNK,
    ),
)


def _experts(recipe: Recipe, normal: Normal) -> Weights:
    """The feed-forward part of every layer."""
    size, inner = recipe.target.hidden_size, _EXPERTS.inner
    weights = {
        "mlp.gate.weight": normal(_EXPERTS.count, size, std=1.5 * size**-0.5),
        "mlp.gate.e_score_correction_bias": normal(_EXPERTS.count, std=0.1),
    }
    for name in (*(f"experts.{expert}" for expert in range(_EXPERTS.count)), "shared_experts"):
        weights[f"mlp.{name}.up_proj.weight"] = normal(inner, size, std=size**-0.5)
        weights[f"mlp.{name}.down_proj.weight"] = normal(size, inner, std=recipe.mlp_gain * inner**-0.5)
    return weights


def _attention(recipe: Recipe, normal: Normal) -> Weights:
    return attention_weights(recipe.target, 2 * recipe.attention_gain, normal)


def _scan(recipe: Recipe, normal: Normal) -> Weights:
    """A layer that keeps a state: half of it is gone after a few positions in some heads, and after a few dozen in others."""
    import torch

    size, scan = recipe.target.hidden_size, _SCAN
    wide = scan.heads * scan.width
    return {
        "mamba.in_proj_gate.weight": normal(wide, size, std=size**-0.5),
        "mamba.in_proj_mixed.weight": normal(scan.mixed, size, std=size**-0.5),
        "mamba.in_proj_step.weight": normal(scan.heads, size, std=size**-0.5),
        "mamba.conv1d.weight": normal(scan.mixed, scan.kernel, std=scan.kernel**-0.5),
        "mamba.conv1d.bias": normal(scan.mixed, std=0.1),
        "mamba.step_bias": normal(scan.heads, std=0.5),
        "mamba.A_log": torch.linspace(-4, -1, scan.heads) + normal(scan.heads, std=0.1),
        "mamba.D": 1 + normal(scan.heads, std=0.1),
        "mamba.norm.weight": 1 + normal(wide, std=0.1),
        "mamba.out_proj.weight": normal(size, wide, std=2 * recipe.attention_gain * wide**-0.5),
    }


_OF_HEAD = {
    "eh_proj.weight": "mtp.layers.0.eh_proj.weight",
    "enorm.weight": "mtp.layers.0.enorm.weight",
    "hnorm.weight": "mtp.layers.0.hnorm.weight",
    "norm.weight": "mtp.layers.1.final_layernorm.weight",
}
_OF_TARGET = {
    "model.embed_tokens.weight": "backbone.embeddings.weight",
    "model.norm.weight": "backbone.norm_f.weight",
    "lm_head.weight": "lm_head.weight",
}
# What the parts of a layer are called, and in which of a checkpoint's two they lie.
_OF_LAYER = (
    ("input_layernorm.", 0, "norm."),
    ("post_attention_layernorm.", 1, "norm."),
    ("self_attn.", 0, "mixer."),
    ("mamba.step_bias", 0, "mixer.dt_bias"),
    ("mamba.", 0, "mixer."),
    ("mlp.", 1, "mixer."),
)


def checkpoint(recipe: Recipe, target: Weights, draft: Weights) -> tuple[Part, Part]:
    """One configuration for both: SGLang gives the draft's model class another name by itself."""
    shape, scan, experts = recipe.target, _SCAN, _EXPERTS
    config = {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "".join("ME" if shape.keeps_state(layer) else "*E" for layer in range(shape.num_layers)),
        "num_hidden_layers": 2 * shape.num_layers,
        "layer_norm_epsilon": shape.rms_norm_eps,
        "mamba_num_heads": scan.heads,
        "mamba_head_dim": scan.width,
        # SGLang reads both
        "n_groups": scan.groups,
        "mamba_n_groups": scan.groups,
        "ssm_state_size": scan.state,
        "conv_kernel": scan.kernel,
        "use_conv_bias": True,
        "use_bias": False,
        "chunk_size": CHUNK,
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "n_routed_experts": experts.count,
        "num_experts_per_tok": experts.chosen,
        "moe_intermediate_size": experts.inner,
        "moe_shared_expert_intermediate_size": experts.inner,
        "n_shared_experts": 1,
        "routed_scaling_factor": experts.scale,
        "norm_topk_prob": True,
        "n_group": experts.groups,
        "topk_group": experts.kept,
        "num_nextn_predict_layers": 1,
        "mtp_hybrid_override_pattern": "*E",
    }
    served = _to_checkpoint(target, "model.layers.", "backbone.layers.")
    return Part(config, shape, served), Part(config, shape, _to_checkpoint(draft, "layers.", "mtp.layers."))


def _to_checkpoint(weights: Weights, prefix: str, renamed: str) -> Weights:
    """By the names and in the order of Nemotron's checkpoint."""
    import torch

    found: Weights = {}
    for name, tensor in weights.items():
        if not name.startswith(prefix):
            found[(_OF_HEAD | _OF_TARGET)[name]] = tensor
            continue
        number, _, part = name.removeprefix(prefix).partition(".")
        if part.startswith("mamba.in_proj_"):
            parts = (weights[f"{prefix}{number}.mamba.in_proj_{of}.weight"] for of in ("gate", "mixed", "step"))
            found[f"{renamed}{2 * int(number)}.mixer.in_proj.weight"] = torch.cat(list(parts))
            continue
        ours, second, theirs = next(one for one in _OF_LAYER if part.startswith(one[0]))
        kept = tensor[:, None].contiguous() if part == "mamba.conv1d.weight" else tensor
        found[f"{renamed}{2 * int(number) + second}.{theirs}{part.removeprefix(ours)}"] = kept
    return found


FAMILY = Family(
    name="nemotron_h",
    recipes=RECIPES,
    draft_weights=joined_layer,
    heads=joined_head,
    checkpoint=checkpoint,
    layer_weights=partial(state_or_attention_layer, keeps=_scan, attends=_attention, feeds=_experts),
    modules=("sglang.srt.models.nemotron_h", "sglang.srt.models.nemotron_h_mtp"),
    environment={"SGLANG_MAMBA_CONV_DTYPE": "float32"},
    dp_attention=True,
    limits=("float32 on one rank", "experts behind every layer, of the hidden state's width", "a routed scale of 1"),
)
