"""A layer that keeps a state in place of rows: a selective state space, behind a short convolution (Mamba-2).

Of each head there is one matrix S [W, D], which every position changes: it decays, and the position's input x is put there
along B, which its group's heads share. What is read along C, and the input itself times the head's D, is the output. With a
step of size t = softplus(a + bias) and a negative number -exp(A) of the head:

    S_i = exp(-exp(A) t) S_(i-1) + t x B^T          o_i = S_i C + D x

Source: Mamba-2 (arXiv 2405.21060), equation 1 with the scalar A of §2.2, and §7 for the block: x, B and C come out of a
convolution over the last `kernel` inputs of each channel, with SiLU. B and C are groups' (§7.2). The output times SiLU of a
gate is normed, each group by its own root mean square (§7.3; Nemotron-H, arXiv 2504.03624, §2.1).

One position at a time, and no chunks. Called by llama.py.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear, silu, softplus

from .kept import Kept, recur, windows
from .norm import Weights, rms_norm
from .sizes import ScanShape


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
    kept = recur(nothing, lengths, lambda state, row: step(state, decay[row], size[row], value[row], put[row]))
    out = (kept @ read[..., None])[..., 0] + weights[f"{prefix}D"][:, None] * value  # [R, N, W]
    gate = linear(inner, weights[f"{prefix}in_proj_gate.weight"])  # [R, N*W]
    grouped = (out.flatten(1) * silu(gate)).view(rows, shape.groups, -1)  # [R, groups, N*W/groups]
    normed = rms_norm(grouped, weights[f"{prefix}norm.weight"].view(shape.groups, -1), eps).flatten(1)  # [R, N*W]
    return linear(normed, weights[f"{prefix}out_proj.weight"]), Kept(kept, seen[..., 1:])


def step(state: Tensor, decay: Tensor, size: Tensor, value: Tensor, put: Tensor) -> Tensor:
    """The state [N, W, D] after a position with decay and step size [N], input [N, W], and B [N, D]."""
    return decay[:, None, None] * state + (size[:, None] * value)[..., None] * put[:, None]
