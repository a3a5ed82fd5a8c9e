"""MiMo-V2: every second layer has a sliding window, each layer of its draft has one.

Step-3.5 shares the windows, and a draft of MTP layers as DeepSeek-V3 defines them. Each has two recipes of one draw of weights.
The window of one is longer than most cases: what is served there are the hybrid pools with the arithmetic of full attention.
The window of the other ends in every case, and slots that leave it are freed.

What a checkpoint calls `sliding_window` is how far back a row sees, by SGLang's classes of both: a row sees so many before its
own, and its own. transformers' models see one row less (docs/explanation/windows.md). Feed-forward layers are dense.
"""

from dataclasses import replace
from types import MappingProxyType

from eagletwin.reference.sizes import LlamaShape

from . import mtp
from .recipe import Family, Head, Normal, Part, Recipe, Tensor, Weights, llama_shape

# How far back a row sees. The first is more than most generated cases need, and less than the smallest pool that one is given:
# SGLang wants room for a whole window.
WINDOW = 72
ENDING = 8
LIMITS = ("feed-forward layers are dense", "no sinks", "rotary embedding of the whole head, of one base in all layers")
# SGLang frees what left a window once so many rows can be freed together. Its default, 128, is more than a case here has.
ENVIRONMENT = MappingProxyType({"SGLANG_SWA_EVICTION_INTERVAL": "1"})


def with_windows(shape: LlamaShape, back: int, *, draft: bool = False) -> LlamaShape:
    """The shape with windows in every second layer from layer 1 on; of a draft, in all."""
    return replace(shape, windows=tuple((back + 1) * (draft or layer % 2) for layer in range(shape.num_layers)))


def both_windows(long: Recipe, ending_share: float) -> tuple[Recipe, Recipe]:
    """The recipe, and the one whose windows end, which has another min_share."""
    return _with_window(long, long.name, WINDOW), replace(
        _with_window(long, f"{long.name}-window", ENDING), min_share=ending_share
    )


def _with_window(recipe: Recipe, name: str, back: int) -> Recipe:
    target, draft = with_windows(recipe.target, back), with_windows(recipe.draft, back, draft=True)
    return replace(recipe, name=name, target=target, draft=draft, window=back)


def draft_weights(recipe: Recipe, target: Weights, normal: Normal) -> Weights:
    """MTP layers that differ from each other by their noise."""
    return mtp.layers_of(recipe, lambda: mtp.joined_layer(recipe, target, normal))


def heads(recipe: Recipe, draft: Weights, embedding: Tensor, lm_head: Tensor, proposes: Tensor) -> tuple[Head, ...]:  # noqa: ARG001
    """An MTP head a layer."""
    from eagletwin.reference.draft_heads import MtpHead

    return tuple(MtpHead(mtp.layer_of(draft, n), recipe.draft, embedding, lm_head) for n in range(recipe.mtp_layers))


def served_layer(draft: Weights, layer: int) -> Weights:
    """One layer of the draft; its decoder layer without the number that the reference's head gives it."""
    return {name.removeprefix("layers.0."): tensor for name, tensor in mtp.layer_of(draft, layer).items()}


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
