"""What MiMo-V2 and Step-3.5 share: layers with a sliding window, and a draft of MTP layers as DeepSeek-V3 defines them.

Each has two recipes of one draw of weights. The window of one is longer than most cases: what is served there are the hybrid
pools with the arithmetic of full attention. The window of the other ends in every case, and slots that leave it are freed.

What a checkpoint calls `sliding_window` is how far back a row sees, by SGLang's classes of both: a row sees so many before its
own, and its own. transformers' models see one row less (docs/explanation/windows.md). Feed-forward layers are dense.
"""

from dataclasses import replace
from types import MappingProxyType

from eagletwin.reference.sizes import LlamaShape

from . import mtp
from .recipe import Head, Normal, Recipe, Tensor, Weights

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
