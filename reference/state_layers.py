"""Layers that keep a state in place of rows: the gated delta rule and Mamba-2, each behind a short convolution."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, silu, softplus

from .layers import Weights, rms_norm
from .sizes import DeltaShape, ScanShape

# What a layer that keeps a state in place of rows keeps of a sequence, and the short convolution before it.
#
# Both kinds of layer convolve over the last few inputs of each channel, and keep those.


@dataclass(frozen=True, slots=True)
class Kept:
    """What the layer keeps after each of R rows: what a row behind it begins from.

    state   [R, N, W, D]  of each head: rows by value, columns by key
    window  [R, C, kernel - 1]  inputs of the convolution, the oldest first; 0 before the sequence began
    """

    state: Tensor
    window: Tensor


def windows(mixed: Tensor, lengths: Sequence[int], kernel: int) -> Tensor:
    """The last `kernel` inputs of each channel, with each row's own: mixed [R, C] -> [R, C, kernel].

    lengths: of the sequences that the rows are.
    """
    before = torch.zeros(kernel - 1, mixed.shape[1], dtype=mixed.dtype)
    padded, begin = [], 0
    for length in lengths:
        padded.append(torch.cat([before, mixed[begin : begin + length]]).unfold(0, kernel, 1))  # [length, C, kernel]
        begin += length
    return torch.cat(padded)


def recur(nothing: Tensor, lengths: Sequence[int], step: Callable[[Tensor, int], Tensor]) -> Tensor:
    """The state after each row [R, N, W, D]. nothing [N, W, D]: before a sequence begins; lengths: of the sequences that the
    rows are; step(state, row): the state after that row."""
    states: list[Tensor] = []
    for length in lengths:
        state = nothing
        for _ in range(length):
            state = step(state, len(states))
            states.append(state)
    return torch.stack(states) if states else nothing[None][:0]


# A layer that keeps a state in place of rows: the gated delta rule, behind a short convolution (Gated DeltaNet).
#
# Of each head there is one matrix S [W, D], which every position changes: it decays by alpha, the value that it has stored
# under the position's key k is taken out in part, and the position's own value v is put there. With beta between 0 and 1:
#
#     S_i = alpha S_(i-1) (I - beta k k^T) + beta v k^T          o_i = S_i q / sqrt(D)
#
# Source: Gated Delta Networks (arXiv 2412.06464), equation 10. alpha = exp(-exp(A) softplus(a + bias)) is Mamba-2's (arXiv
# 2405.21060); a and beta's logit are linear in the input. Queries and keys are normalized to length 1 (section 3.3 there).
# Queries, keys and values come out of a convolution over the last `kernel` inputs of each channel, with SiLU. What a layer adds
# is the output of each head, normed, times SiLU of a gate (figure 1 there).
#
# One position at a time, and no chunks: what is kept of a sequence x[0..i] is the state after i alone, and the last
# `kernel - 1` inputs of the convolution. Called by llama.py.


def delta_layer(
    weights: Weights, prefix: str, shape: DeltaShape, inner: Tensor, lengths: Sequence[int], eps: float
) -> tuple[Tensor, Kept]:
    """What the layer adds to rows inner [R, H], and what it keeps after each. lengths: of the sequences that the rows are.

    Weights, in float64: in_proj_qkv [C, H], in_proj_z [N*W, H], in_proj_a and in_proj_b [N, H], conv1d [C, kernel], A_log [N],
    dt_bias [N], norm [W], out_proj [H, N*W]. Queries come first in the channels, keys next, values last.
    """
    rows, keys = len(inner), shape.key_heads * shape.key
    mixed = linear(inner, weights[f"{prefix}in_proj_qkv.weight"])  # [R, C]
    seen = windows(mixed, lengths, shape.kernel)  # [R, C, kernel]
    convolved = silu((seen * weights[f"{prefix}conv1d.weight"]).sum(-1))  # [R, C]
    query, key, value = convolved[:, :keys], convolved[:, keys : 2 * keys], convolved[:, 2 * keys :]
    shared = shape.value_heads // shape.key_heads
    query, key = (
        unit(part.view(rows, shape.key_heads, shape.key)).repeat_interleave(shared, 1) for part in (query, key)
    )  # [R, N, D]
    value = value.view(rows, shape.value_heads, shape.value)  # [R, N, W]
    rate = softplus(linear(inner, weights[f"{prefix}in_proj_a.weight"]) + weights[f"{prefix}dt_bias"])  # [R, N]
    decay = (-weights[f"{prefix}A_log"].exp() * rate).exp()  # [R, N]
    beta = linear(inner, weights[f"{prefix}in_proj_b.weight"]).sigmoid()  # [R, N]

    nothing = torch.zeros(shape.value_heads, shape.value, shape.key, dtype=inner.dtype)  # [N, W, D]
    kept = recur(nothing, lengths, lambda state, row: delta_step(state, decay[row], beta[row], key[row], value[row]))
    out = (kept @ query[..., None])[..., 0] / shape.key**0.5  # [R, N, W]
    gate = linear(inner, weights[f"{prefix}in_proj_z.weight"]).view(rows, shape.value_heads, shape.value)  # [R, N, W]
    out = rms_norm(out, weights[f"{prefix}norm.weight"], eps) * silu(gate)
    return linear(out.flatten(1), weights[f"{prefix}out_proj.weight"]), Kept(kept, seen[..., 1:])


def delta_step(state: Tensor, decay: Tensor, beta: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The state [N, W, D] after a position with decay and beta [N], key [N, D], value [N, W]."""
    decayed = decay[:, None, None] * state
    stored = (decayed @ key[..., None])[..., 0]  # [N, W]: the value under this key
    return decayed + (beta[:, None] * (value - stored))[..., None] * key[:, None]


def unit(x: Tensor) -> Tensor:
    """x [.., D] scaled to length 1. What is added under the root is that of the published models."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


# A layer that keeps a state in place of rows: a selective state space, behind a short convolution (Mamba-2).
#
# Of each head there is one matrix S [W, D], which every position changes: it decays, and the position's input x is put there
# along B, which its group's heads share. What is read along C, and the input itself times the head's D, is the output. With a
# step of size t = softplus(a + bias) and a negative number -exp(A) of the head:
#
#     S_i = exp(-exp(A) t) S_(i-1) + t x B^T          o_i = S_i C + D x
#
# Source: Mamba-2 (arXiv 2405.21060), equation 1 with the scalar A of §2.2, and §7 for the block: x, B and C come out of a
# convolution over the last `kernel` inputs of each channel, with SiLU. B and C are groups' (§7.2). The output times SiLU of a
# gate is normed, each group by its own root mean square (§7.3; Nemotron-H, arXiv 2504.03624, §2.1).
#
# One position at a time, and no chunks. Called by llama.py.


def scan_layer(
    weights: Weights, prefix: str, shape: ScanShape, inner: Tensor, lengths: Sequence[int], eps: float
) -> tuple[Tensor, Kept]:
    """What the layer adds to rows inner [R, H], and what it keeps after each. lengths: of the sequences that the rows are.

    Weights, in float64: in_proj_gate [N*W, H], in_proj_mixed [C, H], in_proj_step [N, H], conv1d [C, kernel] and its bias [C],
    A_log, D and step_bias [N], norm [N*W], out_proj [H, N*W]. Inputs come first in the channels, B next, C last.
    """
    rows, wide, each = len(inner), shape.heads * shape.width, shape.groups * shape.state
    mixed = linear(inner, weights[f"{prefix}in_proj_mixed.weight"])  # [R, C]
    seen = windows(mixed, lengths, shape.kernel)  # [R, C, kernel]
    convolved = silu((seen * weights[f"{prefix}conv1d.weight"]).sum(-1) + weights[f"{prefix}conv1d.bias"])  # [R, C]
    value = convolved[:, :wide].view(rows, shape.heads, shape.width)  # [R, N, W]
    put, read = (
        part.view(rows, shape.groups, shape.state).repeat_interleave(shape.heads // shape.groups, 1)
        for part in (convolved[:, wide : wide + each], convolved[:, wide + each :])
    )  # [R, N, D] each
    size = softplus(linear(inner, weights[f"{prefix}in_proj_step.weight"]) + weights[f"{prefix}step_bias"])  # [R, N]
    decay = (-weights[f"{prefix}A_log"].exp() * size).exp()  # [R, N]

    nothing = torch.zeros(shape.heads, shape.width, shape.state, dtype=inner.dtype)  # [N, W, D]
    kept = recur(nothing, lengths, lambda state, row: scan_step(state, decay[row], size[row], value[row], put[row]))
    out = (kept @ read[..., None])[..., 0] + weights[f"{prefix}D"][:, None] * value  # [R, N, W]
    gate = linear(inner, weights[f"{prefix}in_proj_gate.weight"])  # [R, N*W]
    grouped = (out.flatten(1) * silu(gate)).view(rows, shape.groups, -1)  # [R, groups, N*W/groups]
    normed = rms_norm(grouped, weights[f"{prefix}norm.weight"].view(shape.groups, -1), eps).flatten(1)  # [R, N*W]
    return linear(normed, weights[f"{prefix}out_proj.weight"]), Kept(kept, seen[..., 1:])


def scan_step(state: Tensor, decay: Tensor, size: Tensor, value: Tensor, put: Tensor) -> Tensor:
    """The state [N, W, D] after a position with decay and step size [N], input [N, W], and B [N, D]."""
    return decay[:, None, None] * state + (size[:, None] * value)[..., None] * put[:, None]
