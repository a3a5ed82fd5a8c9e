"""The gated delta rule over a prefill's rows, in place of SGLang's chunked kernels: one position after another, in torch.

Those kernels use block pointers, which Triton 3.9 has dropped and no runtime here has, and refuse float32. What they are given
and what they leave behind is the same; compat/state_layers.py puts this in their place, and says so. Decode, verify and commit
have kernels of their own, which run.
"""

from typing import Any

import torch
from torch import Tensor

from ..blame import indices_of_caller

CHUNK = 64  # SGLang's CHUNK_SIZE: a state is noted where each chunk of a sequence begins


@indices_of_caller()
def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    inplace_update: bool = True,
) -> tuple[Tensor, None, Tensor]:
    """Outputs [1, T, HV, V], and the states [1, chunks, HV, V, K] from which each chunk of each sequence began.

    q, k           [1, T, H, K]; v [1, T, HV, V]; g [1, T, HV] logarithms of the decay; beta [1, T, HV]
    initial_state  [slots, HV, V, K]: a sequence begins from initial_state_indices [N], and its last state goes there
    cu_seqlens     [N + 1] where the sequences begin and end
    """
    if head_first or initial_state is None or initial_state_indices is None or cu_seqlens is None:
        raise NotImplementedError("the stand-in for chunk_gated_delta_rule takes sequences side by side, with their slots")
    shared = v.shape[2] // q.shape[2]
    query, key = (part[0].float().repeat_interleave(shared, 1) for part in (q, k))  # [T, HV, K]
    if use_qk_l2norm_in_kernel:
        query, key = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6) for part in (query, key))
    query = query * (k.shape[-1] ** -0.5 if scale is None else scale)
    value, decay, rate = v[0].float(), g[0].float().exp(), beta[0].float()
    out, noted = torch.empty_like(value), []
    bounds: list[int] = cu_seqlens.tolist()
    for slot, begin, end in zip(initial_state_indices.tolist(), bounds, bounds[1:], strict=False):
        state = initial_state[slot].float() if slot >= 0 else torch.zeros_like(initial_state[0]).float()
        for row in range(begin, end):
            if (row - begin) % CHUNK == 0:
                noted.append(state)
            state = decay[row, :, None, None] * state
            change = rate[row, :, None] * (value[row] - (state @ key[row, :, :, None])[..., 0])  # [HV, V]
            state = state + change[:, :, None] * key[row, :, None, :]
            out[row] = (state @ query[row, :, :, None])[..., 0]
        if inplace_update and slot >= 0:
            initial_state[slot] = state.to(initial_state.dtype)
    chunks: Any = torch.stack(noted) if noted else initial_state[:0].float()
    return out[None].to(v.dtype), None, chunks[None]
