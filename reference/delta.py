"""A layer that keeps a state in place of rows: the gated delta rule, behind a short convolution (Gated DeltaNet).

Of each head there is one matrix S [W, D], which every position changes: it decays by alpha, the value that it has stored under
the position's key k is taken out in part, and the position's own value v is put there. With beta between 0 and 1:

    S_i = alpha S_(i-1) (I - beta k k^T) + beta v k^T          o_i = S_i q / sqrt(D)

Source: Gated Delta Networks (arXiv 2412.06464), equation 10. alpha = exp(-exp(A) softplus(a + bias)) is Mamba-2's (arXiv
2405.21060); a and beta's logit are linear in the input. Queries and keys are normalized to length 1 (section 3.3 there).
Queries, keys and values come out of a convolution over the last `kernel` inputs of each channel, with SiLU. What a layer adds
is the output of each head, normed, times SiLU of a gate (figure 1 there).

One position at a time, and no chunks: what is kept of a sequence x[0..i] is the state after i alone, and the last
`kernel - 1` inputs of the convolution. Called by llama.py.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear, silu, softplus

from .kept import Kept, recur, windows
from .norm import Weights, rms_norm
from .sizes import DeltaShape


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
    kept = recur(nothing, lengths, lambda state, row: step(state, decay[row], beta[row], key[row], value[row]))
    out = (kept @ query[..., None])[..., 0] / shape.key**0.5  # [R, N, W]
    gate = linear(inner, weights[f"{prefix}in_proj_z.weight"]).view(rows, shape.value_heads, shape.value)  # [R, N, W]
    out = rms_norm(out, weights[f"{prefix}norm.weight"], eps) * silu(gate)
    return linear(out.flatten(1), weights[f"{prefix}out_proj.weight"]), Kept(kept, seen[..., 1:])


def step(state: Tensor, decay: Tensor, beta: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The state [N, W, D] after a position with decay and beta [N], key [N, D], value [N, W]."""
    decayed = decay[:, None, None] * state
    stored = (decayed @ key[..., None])[..., 0]  # [N, W]: the value under this key
    return decayed + (beta[:, None] * (value - stored))[..., None] * key[:, None]


def unit(x: Tensor) -> Tensor:
    """x [.., D] scaled to length 1. What is added under the root is that of the published models."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
