"""DeepSeek-V4's draft: one layer between several residual streams (compressed.py), which compresses nothing."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from .compressed import join_streams, sizes_of, streams_layer
from .draft_heads import DraftRows, StateHead
from .layers import Weights, rms_norm
from .rows import Standing
from .sizes import LlamaShape


@dataclass(frozen=True, slots=True)
class StreamsHead(StateHead):
    """The draft: one layer that compresses nothing, with the target's embedding and LM head. It consumes streams [R, S*H].

    Each stream is the token's part and the stream's own: `e_proj` of the normed embedding, and `h_proj` of the normed stream
    that the target, or the step before, handed on. What is handed on are the streams before the last sum.

    weights  float64: `enorm.weight`, `hnorm.weight` [H], `e_proj.weight`, `h_proj.weight` [H, H], `layers.0.…`, `hc_head.…`,
             `norm.weight [H]`
    """

    weights: Weights
    shape: LlamaShape
    embedding: Tensor
    lm_head: Tensor

    def rows(self, tokens: Tensor, hidden: Tensor, positions: Tensor, sees: Tensor, before: DraftRows | None) -> DraftRows:
        """See eagle.draft_rows."""
        sizes, weights, eps = sizes_of(self.shape), self.weights, self.shape.rms_norm_eps
        embedded = rms_norm(self.embedding[tokens], weights["enorm.weight"], eps)  # [R, H]
        streams = rms_norm(torch.unflatten(hidden, -1, (sizes.streams, -1)), weights["hnorm.weight"], eps)  # [R, S, H]
        x = linear(embedded, weights["e_proj.weight"])[:, None] + linear(streams, weights["h_proj.weight"])
        stored = None if before is None else before.keys[0]
        x, part = streams_layer(weights, "layers.0.", self.shape, 0, x, tokens, Standing(positions, sees, before=stored))
        joined = join_streams(weights, "hc_head.", sizes, x, eps)
        logits = linear(rms_norm(joined, weights["norm.weight"], eps), self.lm_head)
        return DraftRows(x.flatten(1), logits, part.stored[None], part.stored[None, ..., :0])
