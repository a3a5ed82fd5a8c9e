"""A decoder as a plain function of a token sequence (the target model): a Llama, or what differs from one in its layers.

Not fast: every position at once, float64 throughout. A batch is a mask: sequences stand one after the other in one forward,
and none sees another. The draft head (eagle.py) is built from the same decoder layer. Checked against transformers' Llama in
tests/reference/test_against_transformers.py.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from .compressed import streams_target
from .experts import clamped_experts, experts, gated_mlp
from .gemma4 import cap_logits, embed, gemma_layer
from .layers import Weights, latent_attention, rms_norm, rotate
from .rows import TargetRows, causal, in_window, side_by_side
from .sizes import LlamaShape
from .state_layers import Kept, delta_layer, scan_layer

__all__ = ["TargetRows", "Weights", "causal", "decoder_layer", "in_window", "side_by_side", "target_rows"]


def decoder_layer(
    weights: Weights,
    prefix: str,
    shape: LlamaShape,
    x: Tensor,
    positions: Tensor,
    sees: Tensor,
    *,
    inner: Tensor | None = None,
    before: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One pre-norm decoder layer over rows x [R, H] at positions [R]; row r attends to the rows where sees[r] is true.

    inner [R, ..]: what attention reads; none given: x after the layer's input norm. The first layer of a draft head differs.
    before: (keys, values) [E, G, D] each of rows that stand before these; sees is [R, E + R] then.
    Returns (x [R, H], keys [R, G, D], values [R, G, D]), of the R rows; of latent rows, which are both, the values are empty.
    """
    if inner is None:
        inner = rms_norm(x, weights[f"{prefix}input_layernorm.weight"], shape.rms_norm_eps)  # [R, H]
    attention = f"{prefix}self_attn."
    if shape.latent is not None:
        stored = None if before is None else before[0]
        attended, key = latent_attention(weights, attention, shape, shape.latent, inner, positions, sees, stored)
        value = key[..., :0]
    else:
        attended, key, value = _attention(weights, attention, shape, inner, positions, sees, before)
    x = x + linear(attended, weights[f"{attention}o_proj.weight"], weights.get(f"{attention}o_proj.bias"))
    return _feed_forward(weights, prefix, shape, x), key, value


def _feed_forward(weights: Weights, prefix: str, shape: LlamaShape, x: Tensor) -> Tensor:
    """The second half of a decoder layer: x [R, H] -> [R, H]."""
    inner = rms_norm(x, weights[f"{prefix}post_attention_layernorm.weight"], shape.rms_norm_eps)  # [R, H]
    if shape.clamped is not None and f"{prefix}mlp.router.weight" in weights:
        return x + clamped_experts(weights, f"{prefix}mlp.", shape.clamped, inner)
    if shape.experts is not None and f"{prefix}mlp.gate.weight" in weights:
        return x + experts(weights, f"{prefix}mlp.", shape.experts, inner)
    return x + gated_mlp(weights, f"{prefix}mlp.", inner)


def _state_layer(weights: Weights, prefix: str, shape: LlamaShape, x: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Kept]:
    """A decoder layer that keeps a state in place of rows, over sequences x [R, H] of these lengths."""
    inner = rms_norm(x, weights[f"{prefix}input_layernorm.weight"], shape.rms_norm_eps)  # [R, H]
    if shape.scan is not None:
        added, kept = scan_layer(weights, f"{prefix}mamba.", shape.scan, inner, lengths, shape.rms_norm_eps)
    elif shape.delta is not None:
        added, kept = delta_layer(weights, f"{prefix}linear_attn.", shape.delta, inner, lengths, shape.rms_norm_eps)
    else:
        raise ValueError("a shape without delta and scan has no layer that keeps a state")
    return _feed_forward(weights, prefix, shape, x + added), kept


def _attention(
    weights: Weights,
    prefix: str,
    shape: LlamaShape,
    inner: Tensor,
    positions: Tensor,
    sees: Tensor,
    before: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention over rows inner [R, ..] -> (attended [R, N*D], keys [R, G, D], values [R, G, D])."""
    rows, groups = inner.shape[0], shape.num_heads // shape.num_kv_heads

    def project(name: str) -> Tensor:
        return linear(inner, weights[f"{prefix}{name}.weight"], weights.get(f"{prefix}{name}.bias"))  # Qwen2 has some

    query = project("q_proj").view(rows, shape.num_heads, (1 + shape.gated) * shape.head_dim)
    query, gate = query[..., : shape.head_dim], query[..., shape.head_dim :]  # [R, N, D], and as much if it is gated
    key = project("k_proj").view(rows, shape.num_kv_heads, shape.head_dim)
    value = project("v_proj").view(rows, shape.num_kv_heads, shape.head_dim)
    if shape.qk_norm:  # one weight [D] for all heads
        query = rms_norm(query, weights[f"{prefix}q_norm.weight"], shape.rms_norm_eps)
        key = rms_norm(key, weights[f"{prefix}k_norm.weight"], shape.rms_norm_eps)
    turned = _apply_rope(shape, torch.cat([query, key], 1), positions)  # [R, N+G, D]
    query, key = turned[:, : shape.num_heads], turned[:, shape.num_heads :]

    keys, values = (key, value) if before is None else (torch.cat([before[0], key]), torch.cat([before[1], value]))
    if groups > 1:
        keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)  # [E+R, N, D]
    score = (query / shape.head_dim**0.5).transpose(0, 1) @ keys.permute(1, 2, 0)  # [N, R, E+R]
    weight = _share(torch.where(sees, score, -torch.inf), weights.get(f"{prefix}sinks"))  # [N, R, E+R]
    attended = (weight @ values.transpose(0, 1)).transpose(0, 1)  # [R, N, D]
    if shape.gated:
        attended = attended * gate.sigmoid()
    return attended.flatten(1), key, value


def _apply_rope(shape: LlamaShape, x: Tensor, positions: Tensor) -> Tensor:
    """Heads x [R, N, D] turned by their positions [R]: all of each, or its front part (partial rotary), or nothing."""
    if not shape.rope_theta:
        return x
    front = x[..., : shape.turning or shape.head_dim]
    turned = rotate(front, positions, shape.rope_theta, shape.rope_scaling)
    return torch.cat([turned, x[..., front.shape[-1] :]], -1)


def _share(score: Tensor, sinks: Tensor | None) -> Tensor:
    """The attention that each row gives to others: score [N, R, E] -> [N, R, E], the softmax of the scores.

    sinks [N]: of each head a score more, of a row with no value, which takes its part of the attention and gives nothing
    (arXiv 2309.17453 §3.2 for such a sink; gpt-oss, arXiv 2508.10925 §2, has one number a head).
    """
    if sinks is None:
        return score.softmax(-1)
    sink = sinks[:, None, None].expand(-1, score.shape[1], 1)  # [N, R, 1]
    return torch.cat([score, sink], -1).softmax(-1)[..., :-1]


def target_rows(weights: Weights, shape: LlamaShape, tokens: Tensor, lengths: Sequence[int] = ()) -> TargetRows:
    """Run the target over tokens [T] at positions 0..T-1. Weights carry Hugging Face's Llama names, in float64.

    lengths: tokens holds sequences of these lengths, one after the other; none given: one sequence.
    """
    lengths = lengths or [len(tokens)]
    if shape.compressed is not None:
        return streams_target(weights, shape, tokens, lengths)
    _, positions, sees = side_by_side(lengths)
    gemma, embedding = shape.gemma, weights["model.embed_tokens.weight"]
    x = embedding[tokens] if gemma is None else embed(embedding, tokens)  # [T, H]
    sees = sees.to(x.device)
    keys, values, aux, kept = [], [], [], []
    within = {window: in_window(sees, window) for window in {0, *shape.windows}}  # [T, T] each
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        if shape.keeps_state(layer):
            x, of_layer = _state_layer(weights, prefix, shape, x, lengths)
            kept.append(of_layer)
        else:
            window = shape.window(layer)
            if gemma is None:
                x, key, value = decoder_layer(weights, prefix, shape, x, positions, within[window])
            else:
                rows = (x, positions, within[window])
                x, key, value = gemma_layer(weights, prefix, shape, *rows, windowed=window > 0)
            keys.append(key)
            values.append(value)
        if layer in shape.aux_layers:
            aux.append(x)
    normed = rms_norm(x, weights["model.norm.weight"], shape.rms_norm_eps)  # [T, H]
    logits = linear(normed, weights["lm_head.weight"])  # [T, V]
    logits = logits if gemma is None else cap_logits(logits, gemma.cap)
    hidden = torch.cat(aux, -1) if aux else x if shape.pre_norm else normed
    return TargetRows(hidden, x, normed, logits, torch.stack(keys), torch.stack(values), tuple(kept))
