"""What MiMo-V2 and Step-3.5 share: layers with a sliding window, and a draft of MTP layers as DeepSeek-V3 defines them.

No case is longer than the windows here, since the reference knows none: what is served are the hybrid pools of these families
with the arithmetic of full attention. Feed-forward layers are dense.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import mtp
from .recipe import Recipe

if TYPE_CHECKING:
    from torch import Tensor

    from eagletwin.reference.eagle import Head

    from .family import Normal, Weights

# More than any generated case needs, and less than the smallest pool that one is given: SGLang wants room for a whole window.
WINDOW = 72
LIMITS = ("no case leaves the window", "feed-forward layers are dense", "no sinks", "rotary embedding of the whole head")


def draft_weights(recipe: Recipe, target: Weights, normal: Normal) -> Weights:
    """MTP layers that differ from each other by their noise."""
    return mtp.layers_of(recipe, lambda: mtp.joined_layer(recipe, target, normal))


def heads(recipe: Recipe, draft: Weights, embedding: Tensor, lm_head: Tensor, proposes: Tensor) -> tuple[Head, ...]:  # noqa: ARG001
    """An MTP head a layer."""
    from eagletwin.reference.mtp_head import MtpHead

    return tuple(MtpHead(mtp.layer_of(draft, n), recipe.draft, embedding, lm_head) for n in range(recipe.mtp_layers))


def served_layer(draft: Weights, layer: int) -> Weights:
    """One layer of the draft; its decoder layer without the number that the reference's head gives it."""
    return {name.removeprefix("layers.0."): tensor for name, tensor in mtp.layer_of(draft, layer).items()}
