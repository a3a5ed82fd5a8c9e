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

from .llama import LlamaShape, Weights, decoder_layer


@dataclass(frozen=True, slots=True)
class EagleHead:
    """A draft head with the target's embedding and LM head.

    weights  float64, names of an EAGLE-1/2 checkpoint: `fc.weight [H, 2H]`, `fc.bias [H]` (optional), `layers.{n}.…`
    embedding [V, H] and lm_head [V, H] of the target
    """

    weights: Weights
    shape: LlamaShape
    embedding: Tensor
    lm_head: Tensor


@dataclass(frozen=True, slots=True)
class DraftRows:
    """What the head computes for each row.

    hidden [R, H]        residual sum: what the next draft step consumes
    logits [R, V]
    keys   [L, R, G, D]  as the draft's KV pool stores them, after RoPE
    values [L, R, G, D]
    """

    hidden: Tensor
    logits: Tensor
    keys: Tensor
    values: Tensor


def draft_rows(
    head: EagleHead, tokens: Tensor, hidden: Tensor, positions: Tensor, sees: Tensor, before: DraftRows | None = None
) -> DraftRows:
    """Run the head over rows that consume tokens [R] and hidden [R, H] at positions [R], attending where sees [R, R].

    before: E rows that stand before these; sees is [R, E + R] then.
    """
    x = torch.cat([head.embedding[tokens], hidden], -1) @ head.weights["fc.weight"].T  # [R, H]
    if "fc.bias" in head.weights:
        x = x + head.weights["fc.bias"]
    keys, values = [], []
    for layer in range(head.shape.num_layers):
        stored = None if before is None else (before.keys[layer], before.values[layer])
        x, key, value = decoder_layer(
            head.weights, f"layers.{layer}.", head.shape, x, positions, sees, input_norm=layer > 0, before=stored
        )
        keys.append(key)
        values.append(value)
    return DraftRows(x, x @ head.lm_head.T, torch.stack(keys), torch.stack(values))
