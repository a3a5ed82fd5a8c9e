"""A decoder layer of Gemma-4, and what such a model does before its first layer and behind its last.

Differences to a Llama's: embeddings are scaled by the root of the hidden size; each half of a layer is normed on its way in and
on its way out (Gemma 2, arXiv 2408.00118 §2); queries, keys and values are normed by head, values without a weight, and the
scores are not scaled any more; the gate is a GELU; what leaves a layer is multiplied by a number of the layer's own; logits are
capped by a tanh. Layers without a window have a rotary embedding of their own, in which the first pairs of a head alone turn.

Checked against transformers' Gemma4ForCausalLM in tests/reference/test_latent_against_transformers.py.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear

from .layers import Weights, rms_norm
from .sizes import GemmaShape, LlamaShape


def embed(embedding: Tensor, tokens: Tensor) -> Tensor:
    """What the first layer is given for tokens [T]: [T, H]."""
    return embedding[tokens] * math.sqrt(embedding.shape[1])


def cap_logits(logits: Tensor, cap: float) -> Tensor:
    """Logits [.., V] between -cap and cap; 0: as they are."""
    return cap * (logits / cap).tanh() if cap else logits


def gemma_layer(
    weights: Weights,
    prefix: str,
    shape: LlamaShape,
    x: Tensor,
    positions: Tensor,
    sees: Tensor,
    *,
    windowed: bool,
    memory: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows x [R, H] at positions [R]; row r attends to the rows where sees[r] is true. windowed: it is a layer with a window.

    memory: (keys, values) [E, G, D] each of another model's rows, which are read in place of the layer's own; sees is [R, E].
    Returns (x [R, H], keys [R, G, D], values [R, G, D]), with a memory those of it.
    """
    gemma = shape.gemma
    if gemma is None:
        raise ValueError("a layer of Gemma-4 was asked of a shape that says nothing of it")

    def norm(name: str, rows: Tensor) -> Tensor:
        return rms_norm(rows, weights[f"{prefix}{name}.weight"], shape.rms_norm_eps)

    def heads(name: str, rows: Tensor) -> Tensor:
        return linear(rows, weights[f"{prefix}self_attn.{name}.weight"]).view(len(rows), -1, shape.head_dim)

    inner = norm("input_layernorm", x)  # [R, H]
    query = _apply_rope(shape, gemma, norm("self_attn.q_norm", heads("q_proj", inner)), positions, windowed)  # [R, N, D]
    if memory is None:
        key = _apply_rope(shape, gemma, norm("self_attn.k_norm", heads("k_proj", inner)), positions, windowed)  # [R, G, D]
        value = rms_norm(heads("v_proj", inner), key.new_ones(shape.head_dim), shape.rms_norm_eps)  # [R, G, D]
    else:
        key, value = memory
    groups = shape.num_heads // shape.num_kv_heads
    keys, values = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)  # [E, N, D]
    score = query.transpose(0, 1) @ keys.permute(1, 2, 0)  # [N, R, E]
    share = torch.where(sees, score, -torch.inf).softmax(-1)
    attended = (share @ values.transpose(0, 1)).transpose(0, 1).flatten(1)  # [R, N*D]
    x = x + norm("post_attention_layernorm", linear(attended, weights[f"{prefix}self_attn.o_proj.weight"]))
    gate, up, down = (weights[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    inner = norm("pre_feedforward_layernorm", x)  # [R, H]
    fed = linear(gelu(linear(inner, gate), approximate="tanh") * linear(inner, up), down)  # [R, H]
    x = x + norm("post_feedforward_layernorm", fed)
    return x * weights[f"{prefix}layer_scalar"], key, value


def _apply_rope(shape: LlamaShape, gemma: GemmaShape, x: Tensor, positions: Tensor, windowed: bool) -> Tensor:
    """Heads x [R, N, D] turned by their positions [R]: pair (d, d + D/2) by position * theta**(-2d/D)."""
    half = shape.head_dim // 2
    theta, pairs = (shape.rope_theta, half) if windowed else (gemma.theta, gemma.pairs)
    turns = theta ** (-torch.arange(half, dtype=torch.float64) / half)  # [D/2]
    turns[pairs:] = 0
    angle = (positions[:, None] * turns)[:, None].to(x)  # [R, 1, D/2]
    first, second = x[..., :half], x[..., half:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
