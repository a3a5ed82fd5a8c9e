"""A plain language model as draft (SGLang's STANDALONE): it reads the committed tokens, and nothing of the target.

Such a model was trained with x[i] at position i, and its row i is a function of x[0..i] alone. So its rows of committed tokens
are 0..M, one more than an EAGLE head has: row M consumes the bonus token x[M], and d[1] is chosen from it. Draft decode step
j = 1..num_steps-1 consumes d[j] at position M + j. There are no hidden states. Source: speculative decoding with a small model
(arXiv 2211.17192 §2.1, 2302.01318 §2), and the definition of a causal language model.

An EAGLE head reads one token ahead of its position, since h[i] has told it of x[0..i] already. A plain model that is run so, on
x[1..] at positions 0.., is the model of a text without its first token. `ahead` says which of the two a draft is run as.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import linear

from .llama import Weights, decoder_layer
from .norm import rms_norm
from .rows import DraftRows
from .sizes import LlamaShape


@dataclass(frozen=True, slots=True)
class PlainDraft:
    """A Llama with its own embedding and LM head.

    weights  float64, Hugging Face's Llama names
    ahead    row i consumes x[i + ahead]: 0, as it was trained
    """

    weights: Weights
    shape: LlamaShape
    ahead: int = 0
    moves: ClassVar[bool] = True  # each step stands one position on

    @property
    def embedding(self) -> Tensor:
        """[V, H], its own."""
        return self.weights["model.embed_tokens.weight"]

    def feed(self, hidden: Tensor) -> Tensor:
        """What rows consume of the target's states: nothing. [R, ..] -> [R, 0]."""
        return hidden[:, :0]

    def rows(self, tokens: Tensor, hidden: Tensor, positions: Tensor, sees: Tensor, before: DraftRows | None) -> DraftRows:  # noqa: ARG002
        """See eagle.draft_rows."""
        x = self.embedding[tokens]  # [R, H]
        keys, values = [], []
        for layer in range(self.shape.num_layers):
            stored = None if before is None else (before.keys[layer], before.values[layer])
            x, key, value = decoder_layer(self.weights, f"model.layers.{layer}.", self.shape, x, positions, sees, before=stored)
            keys.append(key)
            values.append(value)
        normed = rms_norm(x, self.weights["model.norm.weight"], self.shape.rms_norm_eps)  # [R, H]
        logits = linear(normed, self.weights["lm_head.weight"])  # [R, V]
        return DraftRows(x[:, :0], logits, torch.stack(keys), torch.stack(values))
