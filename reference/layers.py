"""Parts of models: weights by name, the norm, rotary embedding, low-rank adapters, and latent attention."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear, pad

from .sizes import LatentShape, LlamaShape, RopeScaling

Weights = Mapping[str, Tensor]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [.., H] scaled to unit root mean square, times weight [H]."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


# Rotary position embedding in the half-split convention of Hugging Face's Llama, and how it is stretched to longer contexts.
#
# Pair (d, d + D/2) of a head turns by the angle position * theta**(-2d/D). A model whose context was lengthened afterwards
# turns some pairs more slowly. Sources: RoFormer (arXiv 2104.09864); `linear` is position interpolation (arXiv 2306.15595),
# `yarn` arXiv 2309.00071 §3.2-3.4, `llama3` the form that Llama 3.1's configuration names. Checked against transformers' own
# functions in tests/reference/test_against_transformers.py.


@lru_cache
def frequencies(half: int, theta: float, scaling: RopeScaling | None = None) -> Tensor:
    """Angle per position of each pair of a head [D/2], float64."""
    plain = theta ** (-torch.arange(half, dtype=torch.float64, device="cpu") / half)  # [D/2]
    if scaling is None:
        return plain
    slow = plain / scaling.factor
    kept = _kept_frequencies(plain, theta, scaling)  # [D/2]
    return plain * kept + slow * (1 - kept)


def _kept_frequencies(plain: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """How much of each pair's own frequency is kept [D/2]: 0 for a pair that is slowed down, 1 for one that is not."""
    if scaling.kind == "linear":
        return torch.zeros_like(plain)
    if scaling.kind == "llama3":  # between the limits, in a straight line over the turns within the original length
        turned = scaling.original * plain / (2 * math.pi)  # [D/2]
        return ((turned - scaling.seldom) / (scaling.often - scaling.seldom)).clamp(0, 1)

    # yarn: in a straight line over the number of the pair
    def pair_that_turns(times: float) -> float:
        return len(plain) * math.log(scaling.original / (times * 2 * math.pi)) / math.log(theta)

    often, seldom = pair_that_turns(scaling.often), pair_that_turns(scaling.seldom)
    if scaling.truncate:
        often, seldom = math.floor(often), math.ceil(seldom)
    often, seldom = max(often, 0), min(seldom, 2 * len(plain) - 1)
    width = max(seldom - often, 1e-3)
    return 1 - ((torch.arange(len(plain), dtype=torch.float64, device="cpu") - often) / width).clamp(0, 1)


@lru_cache
def turns(
    length: int, half: int, theta: float, scaling: RopeScaling | None, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles at positions 0..length-1, for all heads: [length, 1, D/2] each. Angles are float64."""
    angle = torch.arange(length, dtype=torch.float64, device="cpu")[:, None] * frequencies(half, theta, scaling)
    amplitude = 1.0 if scaling is None else scaling.amplitude
    cos, sin = (amplitude * part[:, None] for part in (angle.cos(), angle.sin()))
    return cos.to(device, dtype), sin.to(device, dtype)


def rotate(
    x: Tensor, positions: Tensor, theta: float, scaling: RopeScaling | None = None, *, interleaved: bool = False
) -> Tensor:
    """x [T, N, D] turned by its positions [T] -> [T, N, D].

    interleaved: a pair is (2d, 2d + 1) and not (d, d + D/2), as RoFormer and DeepSeek have it.
    """
    half = x.shape[-1] // 2
    last = int(positions.max()) if len(positions) else 0
    length = 1 << last.bit_length()  # of few lengths, so that no angle's sine is worked out often
    cos, sin = (turn[positions] for turn in turns(length, half, theta, scaling, x.dtype, x.device))  # [T, 1, D/2]
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])  # [T, N, D/2]
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)


# Low-rank adapters (LoRA, arXiv 2106.09685 §4.1): a linear map W becomes W + scale · B A, and nothing else changes.


@dataclass(frozen=True, slots=True)
class LowRank:
    """What is added to one linear map of I inputs and O outputs.

    down [R, I]  A: the input, in R numbers
    up   [O, R]  B: what these add to the output, scale times
    """

    down: Tensor
    up: Tensor
    scale: float


def apply_adapter(weights: Weights, adapter: Mapping[str, LowRank]) -> Weights:
    """The weights of a model with this adapter, which names the weights that it changes."""
    changed = {name: weights[name] + part.scale * (part.up @ part.down) for name, part in adapter.items()}
    return {**weights, **changed}


# Multi-head latent attention: of a position one latent row is stored, of which the keys and values of all heads are made.
#
# A row's input makes a latent vector c, normed, and one key k that turns with the position and is the same for all heads. Head
# n has the key [U_n c, k] and the value V_n c, where U_n and V_n are the two halves of `kv_b_proj`; its query is [q, q turned],
# made of a latent vector of its own. Scores are divided by the root of the whole width of a query. Here all keys and values are
# made of the latent rows: the *plain* form. As U_n can be moved from the key to the query, and V_n behind the sum over values,
# an engine may also attend to the latent rows themselves: the *absorbed* form, which is the same number (as a test holds).
#
# What is stored of a position is [c, k], c normed and k turned. Source: DeepSeek-V2 (arXiv 2405.04434) §2.1, equations 9-19; V3
# (arXiv 2412.19437) §2.1.1, equations 1-11. The norms of the latent vectors are in V2's text and not in its equations. That a
# pair of the rotary embedding is (2d, 2d + 1) is RoFormer's equation 15; DeepSeek's papers do not say it, its model does.
#
# Where the context was lengthened, scores have a temperature (yarn, arXiv 2309.00071 §3.4, equation 15). Unturned parts have
# it, too, so that it cannot be an amplitude of cosines and sines, as the paper proposes.


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
    Returns (attended [R, N*W], latent rows [R, 1, C+P]); C latent.rank, P latent.rope, W latent.value. With an indexer a row
    attends to the rows that it chooses, and its latent row has more columns [R, 1, C+P+I+K]: its own key, and which rows those
    are, as `chosen` below names them, in order.
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
    if shape.index is not None:
        earlier = None if before is None else before[:, 0, latent.width :][:, : shape.index.width]
        order = sees.cumsum(-1) - 1  # [R, E+R]
        sees, key = choose_rows(weights, f"{prefix}indexer.", shape, compressed, inner, positions, sees, earlier)
        named = pad(torch.where(sees, order, -1), (shape.index.chosen, 0), value=-1).sort(-1).values  # [R, K+E+R]
        stored = torch.cat([stored, key[:, None], named[:, None, -shape.index.chosen :]], -1)  # [R, 1, C+P+I+K]

    seen = stored if before is None else torch.cat([before, stored])  # [E+R, 1, C+P]
    made = linear(seen[:, 0, : latent.rank], weights[f"{prefix}kv_b_proj.weight"])  # [E+R, N*(D+W)]
    made = made.view(len(seen), heads, latent.plain + latent.value)
    plain, value = made[..., : latent.plain], made[..., latent.plain :]  # [E+R, N, D], [E+R, N, W]
    key = torch.cat([plain, seen[..., latent.rank : latent.width].expand(-1, heads, -1)], -1)  # [E+R, N, D+P]
    colder = 1.0 if shape.rope_scaling is None else shape.rope_scaling.temperature
    score = (query / (query.shape[-1] ** 0.5 * colder)).transpose(0, 1) @ key.permute(1, 2, 0)  # [N, R, E+R]
    weight = torch.where(sees, score, -torch.inf).softmax(-1)  # [N, R, E+R]
    return (weight @ value.transpose(0, 1)).transpose(0, 1).flatten(1), stored


# Chosen rows (DeepSeek Sparse Attention): latent attention of which a row attends to the few rows that an indexer scores best.
#
# A row has one key k, normed (layer norm), and a query q_h of each index head, made of the latent vector of attention's own
# query. The front of each turns with the position. Row t scores row s by the sum over heads of w_h relu(q_h . k), where the
# weights w_h are made of row t's input. Source: DeepSeek-V3.2-Exp (its report, §2.1, equations 1 and 2).
#
# Its published model has the rest: pairs of the rotary embedding are (d, d + P/2) here, though attention's own are not;
# queries and keys are turned by Hadamard's matrix, and rounded to FP8 (e4m3) by a scale of each, the power of two above its
# largest number over 448; and scores are divided by the roots of the number of heads and of their width. A key is stored as it
# is rounded. It is kept here as it is, and rounded where it is read.
#
# A choice can tie, and FP8 makes many ties: `chosen` [R, K] and `within` are as those of experts (experts.py). Chosen rows are
# named by how many of the rows that a row sees stand before them. within [3]: how far off a product q_h . k may be elsewhere,
# as a share of the sum of its terms' sizes; a number before it is rounded to FP8, as a share of the largest of its row; and a
# number as it is rounded, as a share of its row's root mean square, where such errors do not know of each other.

LARGEST_E4M3 = 448.0
_LEAST = 1e-4  # what the largest number of a row counts as at least


@lru_cache
def hadamard(width: int) -> Tensor:
    """Hadamard's matrix in Sylvester's order, which keeps lengths [D, D], float64."""
    matrix = torch.ones(1, 1, dtype=torch.float64, device="cpu")
    while len(matrix) < width:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    turned: Tensor = matrix / width**0.5
    return turned


def round_to_fp8(x: Tensor, off: float = 0.0) -> tuple[Tensor, Tensor]:
    """x [.., D] as FP8 has it, and how much farther from it each number may be rounded if it is off by so much [.., D]."""
    largest = x.abs().amax(-1, keepdim=True).clamp_min(_LEAST)
    scale = torch.exp2((largest / LARGEST_E4M3).log2().ceil())

    def rounded(number: Tensor) -> Tensor:
        codes = (number / scale).clamp(-LARGEST_E4M3, LARGEST_E4M3)
        return codes.to(torch.float8_e4m3fn).to(x.dtype) * scale

    exact = rounded(x)
    above, below = rounded(x + off * largest), rounded(x - off * largest)
    return exact, torch.maximum((above - exact).abs(), (exact - below).abs())


def choose_rows(
    weights: Weights,
    prefix: str,
    shape: LlamaShape,
    compressed: Tensor,
    inner: Tensor,
    positions: Tensor,
    sees: Tensor,
    before: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Of the rows that each row sees [R, E + R], those that it attends to; and the rows' own keys [R, I].

    compressed [R, Q]: what queries are made of; before [E, I]: earlier keys
    """
    if shape.index is None or shape.latent is None:
        raise ValueError("a shape without an indexer chooses no rows")
    index, turning = shape.index, shape.latent.rope

    def prepare(heads: Tensor) -> Tensor:
        front = rotate(heads[..., :turning], positions, shape.rope_theta, shape.rope_scaling)
        return torch.cat([front, heads[..., turning:]], -1) @ hadamard(index.width).to(heads)

    key = linear(inner, weights[f"{prefix}wk.weight"])
    key = layer_norm(key, key.shape[-1:], weights[f"{prefix}k_norm.weight"], weights[f"{prefix}k_norm.bias"], 1e-6)
    key = prepare(key[:, None])[:, 0]  # [R, I]
    query = prepare(linear(compressed, weights[f"{prefix}wq_b.weight"]).view(-1, index.heads, index.width))
    weight = linear(inner, weights[f"{prefix}weights_proj.weight"]) / (index.heads * index.width) ** 0.5  # [R, h]
    within = weights.get(f"{prefix}within")
    off = 0.0 if within is None else float(within[1])
    keys, keys_off = round_to_fp8(key if before is None else torch.cat([before, key]), off)  # [E+R, I]
    query, query_off = round_to_fp8(query, off)  # [R, h, I]
    product = (query @ keys.T).relu()  # [R, h, E+R]
    score = torch.einsum("rh,rhe->re", weight, product)
    own = _best(score, sees, index.chosen)
    if within is None:
        return own, key
    farther = query_off @ keys.abs().T + query.abs() @ (keys_off + float(within[0]) * keys.abs()).T
    doubt = torch.einsum("rh,rhe->re", weight.abs(), farther)
    spread = float(within[2]) * (2 / index.width) ** 0.5 * keys.norm(dim=-1)  # [E+R]
    doubt = doubt + (weight * query.norm(dim=-1)).norm(dim=-1)[:, None] * spread
    return _follow_choice(weights[f"{prefix}chosen"], own, score, doubt, sees), key


def _best(score: Tensor, sees: Tensor, count: int) -> Tensor:
    """The rows with the largest scores of those that each row sees: bool [R, E]."""
    seen = score.masked_fill(~sees, -torch.inf)
    best = seen.topk(min(count, seen.shape[-1]), -1).indices
    return torch.zeros_like(sees).scatter(-1, best, True) & sees


def _follow_choice(chosen: Tensor, own: Tensor, score: Tensor, doubt: Tensor, sees: Tensor) -> Tensor:
    """What was chosen elsewhere [R, K], -1: nothing, where scores [R, E] that are off by `doubt` admit it; else `own`."""
    order = sees.cumsum(-1) - 1  # [R, E]
    given = (order[:, :, None] == chosen[:, None]).any(-1) & sees  # [R, E]
    as_many = (given.sum(-1) == own.sum(-1)) & ((chosen >= 0).sum(-1) == own.sum(-1))
    worst = torch.where(given, score + doubt, torch.inf).amin(-1)
    best_left = torch.where(sees & ~given, score - doubt, -torch.inf).amax(-1)
    return torch.where((as_many & (worst >= best_left))[:, None], given, own)
