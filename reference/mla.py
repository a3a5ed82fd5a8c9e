"""Multi-head latent attention: of a position one latent row is stored, of which the keys and values of all heads are made.

A row's input makes a latent vector c, normed, and one key k that turns with the position and is the same for all heads. Head n
has the key [U_n c, k] and the value V_n c, where U_n and V_n are the two halves of `kv_b_proj`; its query is [q, q turned],
made of a latent vector of its own. Scores are divided by the root of the whole width of a query. Here all keys and values are
made of the latent rows: the *plain* form. As U_n can be moved from the key to the query, and V_n behind the sum over values, an
engine may also attend to the latent rows themselves: the *absorbed* form, which is the same number (as a test holds).

What is stored of a position is [c, k], c normed and k turned. Source: DeepSeek-V2 (arXiv 2405.04434) §2.1, equations 9-19; V3
(arXiv 2412.19437) §2.1.1, equations 1-11. The norms of the latent vectors are in V2's text and not in its equations. That a
pair of the rotary embedding is (2d, 2d + 1) is RoFormer's equation 15; DeepSeek's papers do not say it, its model does.

Where the context was lengthened, scores have a temperature (yarn, arXiv 2309.00071 §3.4, equation 15). Unturned parts have it,
too, so that it cannot be an amplitude of cosines and sines, as the paper proposes.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear

from .norm import Weights, rms_norm
from .rope import rotate
from .sizes import LatentShape, LlamaShape


def latent_attention(
    weights: Weights,
    prefix: str,
    shape: LlamaShape,
    latent: LatentShape,
    inner: Tensor,
    positions: Tensor,
    sees: Tensor,
    before: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over rows inner [R, H] at positions [R]; row r attends to the rows where sees[r] is true.

    before: latent rows [E, 1, C+P] of rows that stand before these; sees is [R, E + R] then.
    Returns (attended [R, N*W], latent rows [R, 1, C+P]); C latent.rank, P latent.rope, W latent.value.
    """
    rows, heads = inner.shape[0], shape.num_heads
    compressed = linear(inner, weights[f"{prefix}q_a_proj.weight"])  # [R, latent.query_rank]
    compressed = rms_norm(compressed, weights[f"{prefix}q_a_layernorm.weight"], shape.rms_norm_eps)
    query = linear(compressed, weights[f"{prefix}q_b_proj.weight"]).view(rows, heads, latent.plain + latent.rope)
    joint = linear(inner, weights[f"{prefix}kv_a_proj_with_mqa.weight"])  # [R, C+P]
    c = rms_norm(joint[:, : latent.rank], weights[f"{prefix}kv_a_layernorm.weight"], shape.rms_norm_eps)  # [R, C]

    turning = torch.cat([query[..., latent.plain :], joint[:, None, latent.rank :]], 1)  # [R, N+1, P]
    turned = rotate(turning, positions, shape.rope_theta, shape.rope_scaling, interleaved=True)
    query = torch.cat([query[..., : latent.plain], turned[:, :heads]], -1)  # [R, N, D+P]
    stored = torch.cat([c[:, None], turned[:, heads:]], -1)  # [R, 1, C+P]

    seen = stored if before is None else torch.cat([before, stored])  # [E+R, 1, C+P]
    made = linear(seen[:, 0, : latent.rank], weights[f"{prefix}kv_b_proj.weight"])  # [E+R, N*(D+W)]
    made = made.view(len(seen), heads, latent.plain + latent.value)
    plain, value = made[..., : latent.plain], made[..., latent.plain :]  # [E+R, N, D], [E+R, N, W]
    key = torch.cat([plain, seen[..., latent.rank :].expand(-1, heads, -1)], -1)  # [E+R, N, D+P]
    colder = 1.0 if shape.rope_scaling is None else shape.rope_scaling.temperature
    score = (query / (query.shape[-1] ** 0.5 * colder)).transpose(0, 1) @ key.permute(1, 2, 0)  # [N, R, E+R]
    weight = torch.where(sees, score, -torch.inf).softmax(-1)  # [N, R, E+R]
    return (weight @ value.transpose(0, 1)).transpose(0, 1).flatten(1), stored
