"""The EAGLE-3 draft head: one forward over rows, each of which consumes a token and a hidden state.

Source: EAGLE-3 (arXiv 2503.01840) §3.1. Differences to EAGLE-1/2 (eagle.py):

* The target hands over its residual stream at several depths, side by side; fc makes one state of it, for committed rows
  only. Between draft decode steps the head consumes its own state, which has that width already, and fc is left out.
* Attention reads [norm(embedding), norm(hidden)], of width 2H. The residual sum is the hidden state's alone, so the token
  reaches it through attention.
* Logits come from a norm and an LM head of the draft's own, over a vocabulary that may be a part of the target's. What is
  fed on is the residual sum *before* that norm.

Later heads vary this. EAGLE-3.1 (arXiv 2605.09992) norms each of the target's states by itself before fc (`fc_norm`), and feeds
the normed sum on (`norm_output`). Others norm the states side by side (`norm_before_fc`: vLLM, speculators). A head of several
layers has the token in the first alone; the others are layers of a Llama, whose norm before attention is called `hidden_norm`
in SGLang, and `input_layernorm` in vLLM and speculators.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import linear

from .llama import decoder_layer, in_window
from .norm import Weights, rms_norm
from .rows import DraftRows
from .sizes import LlamaShape


@dataclass(frozen=True, slots=True)
class Eagle3Head:
    """An EAGLE-3 draft head, with the target's embedding.

    weights    float64, names of an EAGLE-3 checkpoint: `fc.weight [H, A*T]` for A states of the target of width T,
               `fc.bias [H]`, `input_norm.weight [A*T]` (norm_before_fc) and `fc_norm.{n}.weight [T]` where it has them,
               `midlayer.…`, of several layers `layers.{n}.…` from 1 on, `norm.weight [H]`, `lm_head.weight [N, H]`
    embedding  [V, H] of the target
    proposes   [N] the token of the target's vocabulary that each id of the draft's stands for
    norm_output  what is fed on is normed
    """

    weights: Weights
    shape: LlamaShape
    embedding: Tensor
    proposes: Tensor
    norm_output: bool = False
    ahead: ClassVar[int] = 1  # row i consumes x[i+1]
    moves: ClassVar[bool] = True  # each step stands one position on

    def feed(self, hidden: Tensor) -> Tensor:
        """What committed rows consume, from the states that the target hands over [R, A*T] -> [R, H]."""
        weights, eps = self.weights, self.shape.rms_norm_eps
        if "input_norm.weight" in weights:
            hidden = rms_norm(hidden, weights["input_norm.weight"], eps)
        if "fc_norm.0.weight" in weights:
            states = hidden.chunk(hidden.shape[-1] // weights["fc_norm.0.weight"].shape[0], -1)
            hidden = torch.cat([rms_norm(state, weights[f"fc_norm.{n}.weight"], eps) for n, state in enumerate(states)], -1)
        return linear(hidden, weights["fc.weight"], weights.get("fc.bias"))

    def rows(self, tokens: Tensor, hidden: Tensor, positions: Tensor, sees: Tensor, before: DraftRows | None) -> DraftRows:
        """See draft_rows in eagle.py."""
        weights, eps = self.weights, self.shape.rms_norm_eps
        token = rms_norm(self.embedding[tokens], weights["midlayer.input_layernorm.weight"], eps)  # [R, H]
        state = rms_norm(hidden, weights["midlayer.hidden_norm.weight"], eps)  # [R, H]
        inner = torch.cat([token, state], -1)  # [R, 2H]
        x, keys, values = hidden, list[Tensor](), list[Tensor]()
        for layer in range(self.shape.num_layers):
            prefix = f"layers.{layer}." if layer else "midlayer."
            if layer:
                inner = rms_norm(x, weights[f"{prefix}hidden_norm.weight"], eps)  # [R, H]
            stored = None if before is None else (before.keys[layer], before.values[layer])
            within = in_window(sees, self.shape.window(layer))
            x, key, value = decoder_layer(
                weights, prefix, self.shape, x, positions, within, inner=inner, before=stored
            )  # [R, H], [R, G, D], [R, G, D]
            keys.append(key)
            values.append(value)
        normed = rms_norm(x, weights["norm.weight"], eps)  # [R, H]
        proposed = normed @ weights["lm_head.weight"].T  # [R, N]
        logits = proposed.new_full((len(x), len(self.embedding)), -torch.inf)  # [R, V]
        logits[:, self.proposes] = proposed
        return DraftRows(normed if self.norm_output else x, logits, torch.stack(keys), torch.stack(values))


def proposed_tokens(d2t: Tensor) -> Tensor:
    """The target's token of each draft id, from a checkpoint's d2t [N], which holds the difference of the two -> [N]."""
    return torch.arange(len(d2t), device=d2t.device) + d2t
