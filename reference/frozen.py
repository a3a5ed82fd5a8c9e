"""A draft without a memory of its own, which reads the target's rows: Gemma-4's assistant (SGLang's frozen-KV MTP).

With x[0..M] committed the target has rows 0..M-1. Every forward of a round stands at position M - 1, with the last of them, and
sees those rows and nothing else, its own row and those of its round not among them. The first consumes the bonus token and the
state of that row, (x[M], h[M-1]); step j = 1..num_steps-1 consumes d[j] and the state that the forward before it handed on.

So the first forward is what row M - 1 of an EAGLE head is: (x[i+1], h[i]) at position i. It is a function of committed tokens
alone, and what it proposes is d[1]. There are no rows to store.

Each layer reads the rows of the target's last layer of its kind, with a window or without. Source: Google's
Gemma4AssistantForCausalLM in transformers, and its text on drafting from a single position; docs/explanation/frozen-kv.md says
where engines differ.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import linear

from .gemma4 import embedded, gemma_layer
from .llama import in_window
from .norm import Weights, rms_norm
from .rows import DraftRows
from .sizes import LlamaShape


@dataclass(frozen=True, slots=True)
class FrozenHead:
    """A head with the target's embedding, and an LM head of its own.

    weights  float64: `pre_projection.weight [H, 2B]` (embedding first), `model.layers.{n}.…` without keys and values,
             `model.norm.weight [H]`, `lm_head.weight [V, H]`, `post_projection.weight [B, H]`; B: the target's hidden size
    embedding [V, B] of the target
    reads    of each layer, the target's layer whose rows it reads
    memory   keys and values [L, E, G, D] of the target's rows, by its layers; None: not known yet
    """

    weights: Weights
    shape: LlamaShape
    embedding: Tensor
    reads: tuple[int, ...]
    memory: tuple[Tensor, Tensor] | None = None
    ahead: ClassVar[int] = 1  # the first forward consumes x[i+1] at position i
    moves: ClassVar[bool] = False  # all forwards of a round stand at one position

    def feed(self, hidden: Tensor) -> Tensor:
        """What committed rows consume: the state that the target hands over [R, H], as it is."""
        return hidden

    def rows(self, tokens: Tensor, hidden: Tensor, positions: Tensor, sees: Tensor, before: DraftRows | None) -> DraftRows:  # noqa: ARG002
        """See eagle.draft_rows. Of sees [R, ..] the first E are the target's rows; the others would be those of this round."""
        if self.memory is None:
            raise ValueError("a draft that reads the target's rows was run without them")
        keys, values = self.memory
        committed = sees[:, : keys.shape[1]]  # [R, E]
        given = torch.cat([embedded(self.embedding, tokens), hidden], -1)  # [R, 2B]
        x = linear(given, self.weights["pre_projection.weight"])  # [R, H]
        for layer, read in enumerate(self.reads):
            window = self.shape.window(layer)
            x, _, _ = gemma_layer(
                self.weights,
                f"model.layers.{layer}.",
                self.shape,
                x,
                positions,
                in_window(committed, window),
                windowed=window > 0,
                memory=(keys[read], values[read]),
            )
        normed = rms_norm(x, self.weights["model.norm.weight"], self.shape.rms_norm_eps)  # [R, H]
        nothing = x.new_zeros(0, len(tokens), 1, 1)
        handed_on = linear(normed, self.weights["post_projection.weight"])  # [R, B]
        return DraftRows(handed_on, linear(normed, self.weights["lm_head.weight"]), nothing, nothing)
