"""The EAGLE-1/2 draft head: one forward over rows, each of which consumes a token and a hidden state.

Row i of a request consumes (token x[i+1], hidden h[i]) at position i. Which rows there are, and who sees whom, is chain.py's
business. Source: EAGLE (arXiv 2401.15077) §3.1 and the head of EAGLE-2 (arXiv 2406.16858), which is the same.

Differences to a Llama decoder: the input is fc([embedding(token), hidden]); the first layer has no norm before attention; the
residual sum that leaves the last layer goes to the LM head, and to the next draft step, without a norm. Embedding and LM
head are the target's.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from .draft_heads import DraftRows, Eagle3Head, FrozenHead, MtpHead, PlainDraft, StateHead
from .llama import Weights, decoder_layer
from .sizes import LlamaShape
from .streams_head import StreamsHead

__all__ = ["DraftRows", "EagleHead", "Head", "draft_rows"]


@dataclass(frozen=True, slots=True)
class EagleHead(StateHead):
    """A draft head with the target's embedding and LM head.

    weights  float64, names of an EAGLE-1/2 checkpoint: `fc.weight [H, 2H]`, `fc.bias [H]` (optional), `layers.{n}.…`
    embedding [V, H] and lm_head [V, H] of the target
    """

    weights: Weights
    shape: LlamaShape
    embedding: Tensor
    lm_head: Tensor

    def rows(self, tokens: Tensor, hidden: Tensor, positions: Tensor, sees: Tensor, before: DraftRows | None) -> DraftRows:
        """See draft_rows."""
        x = linear(torch.cat([self.embedding[tokens], hidden], -1), self.weights["fc.weight"])  # [R, H]
        if "fc.bias" in self.weights:
            x = x + self.weights["fc.bias"]
        keys, values = [], []
        for layer in range(self.shape.num_layers):
            inner = x if layer == 0 else None  # [R, H]
            stored = None if before is None else (before.keys[layer], before.values[layer])
            x, key, value = decoder_layer(
                self.weights, f"layers.{layer}.", self.shape, x, positions, sees, inner=inner, before=stored
            )
            keys.append(key)
            values.append(value)
        return DraftRows(x, linear(x, self.lm_head), torch.stack(keys), torch.stack(values))


Head = EagleHead | Eagle3Head | MtpHead | PlainDraft | FrozenHead | StreamsHead


def draft_rows(
    head: Head, tokens: Tensor, hidden: Tensor, positions: Tensor, sees: Tensor, before: DraftRows | None = None
) -> DraftRows:
    """Run the head over rows that consume tokens [R] and hidden [R, H] at positions [R], attending where sees [R, R].

    hidden is of the head's own width: for a committed row, head.feed() of what the target hands over.
    before: E rows that stand before these; sees is [R, E + R] then.
    """
    return head.rows(tokens, hidden, positions, sees, before)
