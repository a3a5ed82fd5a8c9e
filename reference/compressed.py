"""DeepSeek-V4: attention to a window and to compressed rows, between layers that are joined by several residual streams.

*Streams.* Between layers a row is S streams [S, H]. A part of a layer (attention, experts) reads one weighted sum of them, and
its result is added to each by a weight of its own, while the streams are mixed among themselves. All weights are made of the
row's streams: of these side by side, normed. The mixing matrix is made nearly doubly stochastic by Sinkhorn's iterations, so
that it keeps the streams' size. A last sum of the streams goes to the final norm; a draft is handed the streams before it.
Source: manifold-constrained hyper-connections (arXiv 2512.24880), and the configuration of DeepSeek-V4 for which eps stands
where.

*Attention.* All heads have one key, which is their value as well: normed, its back part turned by the position (pairs 2d and
2d + 1). What a head attends to is turned back by its own position. Queries are normed head by head, without a weight. Each head
has a sink. The output is made by groups of heads: each of its own low rank, and these of one matrix.

A row sees the window's newest rows, with itself, and, in a layer of ratio m, one compressed row of each m rows that have ended.
A compressed row is a sum of its rows' vectors; each channel has its own softmax over the rows, of scores with a bias by place.
It is normed, and turned by the position of its first row. With m = 4 two such series overlap: a compressed row is of its own
four rows by the one half of channels, and of the four before by the other. Layers that compress have another base of the
rotary embedding, and a lengthened context; the others have neither. Source: DeepSeek-V4's report, sections 2.2 and 2.3
(equations 9 to 23), and its published configuration.

Of compressed rows an indexer may choose some, by keys that are compressed likewise. It chooses among more rows than `chosen`,
and with no more than that all are attended to. That alone is computed here.

*Stored* are rows as FP8: their front in blocks of 64, by a power of two of each, and their turned part as bfloat16. Rows are
kept here as they are, and rounded where they are read.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from .experts import experts
from .layers import Weights, hadamard, rms_norm, rotate, round_to_fp8
from .rows import Standing, TargetRows, in_window, side_by_side
from .sizes import CompressedShape, LlamaShape

BLOCK = 64  # numbers that share a scale of FP8


def read_stored(rows: Tensor, plain: int) -> Tensor:
    """Rows [.., D] as they are read: `plain` numbers in FP8, the others in bfloat16."""
    front, _ = round_to_fp8(torch.unflatten(rows[..., :plain], -1, (-1, BLOCK)))
    return torch.cat([front.flatten(-2), rows[..., plain:].bfloat16().to(rows)], -1)


# Streams.


def mix_streams(weights: Weights, prefix: str, sizes: CompressedShape, x: Tensor, norm_eps: float) -> list[Tensor]:
    """Of streams x [R, S, H]: weights of the sum that a part reads [R, S], of its result in each stream [R, S], and how much
    of stream j goes to stream i [R, j, i]."""
    count, eps = sizes.streams, sizes.stream_eps
    flat = x.flatten(1)
    made = linear(flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps), weights[f"{prefix}fn"])
    scale, base = weights[f"{prefix}scale"], weights[f"{prefix}base"]
    read, give, mix = torch.split(made, [count, count, count * count], -1)
    of_read, of_give, of_mix = torch.split(base, [count, count, count * count])
    matrix = torch.unflatten(mix * scale[2] + of_mix, -1, (count, count)).softmax(-1) + eps  # [R, S, S]
    matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    for _ in range(sizes.sinkhorn - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    return [(read * scale[0] + of_read).sigmoid() + eps, 2 * (give * scale[1] + of_give).sigmoid(), matrix]


def join_streams(weights: Weights, prefix: str, sizes: CompressedShape, x: Tensor, norm_eps: float) -> Tensor:
    """The last sum: streams x [R, S, H] -> [R, H]."""
    flat = x.flatten(1)
    made = linear(flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps), weights[f"{prefix}fn"])
    share = (made * weights[f"{prefix}scale"] + weights[f"{prefix}base"]).sigmoid() + sizes.stream_eps  # [R, S]
    return (share[..., None] * x).sum(1)


# Compressed rows.


@dataclass(frozen=True, slots=True)
class Compressed:
    """Of R rows, sequences one after the other.

    kept  [R, 2*C*D]  what the compressor keeps of each row: its vectors, and their scores behind them; C series
    rows  [G, D]      compressed rows
    ends  [G]         the last row of each
    """

    kept: Tensor
    rows: Tensor
    ends: Tensor


def compress(weights: Weights, prefix: str, shape: LlamaShape, ratio: int, inner: Tensor, lengths: Sequence[int]) -> Compressed:
    """Compressed rows of inner [R, H], of sequences of these lengths."""
    sizes, width = sizes_of(shape), len(weights[f"{prefix}kv_norm.weight"])
    vector, score = (linear(inner, weights[f"{prefix}{name}.weight"]) for name in ("kv_proj", "gate_proj"))  # [R, C*D]
    rows, ends, begin = [], [], 0
    for length in lengths:
        count = length // ratio
        own = slice(begin, begin + count * ratio)
        vectors = vector[own].view(count, ratio, vector.shape[-1] // width, width)  # [G, ratio, C, D]
        scores = (score[own].view(count, ratio, vector.shape[-1]) + weights[f"{prefix}position_bias"]).view_as(vectors)
        if vectors.shape[2] == 2:  # the first series is of the group before
            before = vectors[:-1, :, 0], scores[:-1, :, 0]
            earlier = (pad(part, (0, 0, 0, 0, 1, 0), value=empty)[:count] for part, empty in zip(before, _NOTHING, strict=True))
            vectors, scores = (torch.cat([old, new[:, :, 1]], 1) for old, new in zip(earlier, (vectors, scores), strict=True))
        else:
            vectors, scores = vectors[:, :, 0], scores[:, :, 0]
        joined = (vectors * scores.softmax(1)).sum(1)  # [G, D]
        joined = rms_norm(joined, weights[f"{prefix}kv_norm.weight"], shape.rms_norm_eps)
        first = torch.arange(count) * ratio
        rows.append(turn(sizes, joined[:, None], first, ratio)[:, 0])
        ends.append(begin + first + ratio - 1)
        begin += length
    return Compressed(torch.cat([vector, score], -1), torch.cat(rows), torch.cat(ends))


_NOTHING = (0.0, -torch.inf)  # a vector of no row, and its score


def turn(sizes: CompressedShape, x: Tensor, positions: Tensor, ratio: int, *, back: bool = False) -> Tensor:
    """The back part of heads x [R, N, D] turned by their positions [R], in a layer of this ratio; `back`: the other way."""
    theta, scaling = (sizes.theta, sizes.scaling) if ratio else (sizes.window_theta, None)
    front, turning = x[..., : -sizes.rope], x[..., -sizes.rope :]
    if not back:
        return torch.cat([front, rotate(turning, positions, theta, scaling, interleaved=True)], -1)
    mirror = torch.tensor([1.0, -1.0], dtype=x.dtype).repeat(sizes.rope // 2)  # of a mirrored pair the same turn goes back
    return torch.cat([front, rotate(turning * mirror, positions, theta, scaling, interleaved=True) * mirror], -1)


# Layers.


def sizes_of(shape: LlamaShape) -> CompressedShape:
    """Raises ValueError for a shape of other layers."""
    if shape.compressed is None:
        raise ValueError("a shape without compressed rows")
    return shape.compressed


@dataclass(frozen=True, slots=True)
class Attended:
    """Of R rows: what attention gives [R, H], what is stored [R, 1, W], and what compressors keep [R, C].

    stored  a row's own, the compressed row and the index key that end with it (zeros: none does); of a ratio of 0 its own alone
    """

    output: Tensor
    stored: Tensor
    kept: Tensor


def attention(weights: Weights, prefix: str, shape: LlamaShape, ratio: int, inner: Tensor, at: Standing) -> Attended:
    """Attention over rows inner [R, H]. Rows stand before them, `at.before`, where the layer compresses nothing."""
    positions, sees, lengths, before = at.positions, at.sees, at.lengths, at.before
    sizes, rows, eps = sizes_of(shape), len(inner), shape.rms_norm_eps
    latent = rms_norm(linear(inner, weights[f"{prefix}q_a_proj.weight"]), weights[f"{prefix}q_a_layernorm.weight"], eps)
    query = linear(latent, weights[f"{prefix}q_b_proj.weight"]).view(rows, shape.num_heads, shape.head_dim)
    query = query * torch.rsqrt(query.square().mean(-1, keepdim=True) + eps)
    query = turn(sizes, query, positions, ratio)
    own = rms_norm(linear(inner, weights[f"{prefix}kv_proj.weight"]), weights[f"{prefix}kv_norm.weight"], eps)
    own = turn(sizes, own[:, None], positions, ratio)  # [R, 1, D]
    kept = inner.new_zeros(rows, 0)
    seen, stored = own if before is None else torch.cat([before, own]), own
    within = in_window(sees, sizes.window)
    if ratio:
        found = compress(weights, f"{prefix}compressor.", shape, ratio, inner, lengths)
        behind = sees[:, found.ends]  # [R, G]: rows that have ended
        if ratio == 4 and len(found.ends) and int(behind.sum(-1).max()) > sizes.chosen:
            raise ValueError("more compressed rows than all are attended to: which are chosen is not computed")
        seen, within = torch.cat([seen, found.rows[:, None]]), torch.cat([within, behind], 1)
        keys = inner.new_zeros(rows, 0)
        kept = found.kept
        if ratio == 4:
            index = compress(weights, f"{prefix}indexer.compressor.", shape, ratio, inner, lengths)
            turned = index.rows @ hadamard(index.rows.shape[-1]).to(index.rows)
            keys = inner.new_zeros(rows, turned.shape[-1]).index_copy(0, index.ends, turned)
            kept = torch.cat([kept, index.kept], -1)
        own_ends = inner.new_zeros(rows, shape.head_dim).index_copy(0, found.ends, found.rows)
        stored = torch.cat([own, own_ends[:, None], keys[:, None]], -1)
    read = read_stored(seen[:, 0], shape.head_dim - sizes.rope)  # [E+R+G, D]
    score = torch.einsum("rnd,ed->nre", query, read) / shape.head_dim**0.5  # [N, R, E+R+G]
    sink = weights[f"{prefix}sinks"][:, None, None].expand(-1, rows, 1)
    share = torch.cat([torch.where(within, score, -torch.inf), sink], -1).softmax(-1)[..., :-1]
    attended = turn(sizes, torch.einsum("nre,ed->rnd", share, read), positions, ratio, back=True)  # [R, N, D]
    groups = attended.reshape(rows, sizes.groups, -1)
    low = torch.einsum("rgd,gkd->rgk", groups, weights[f"{prefix}o_a_proj.weight"].view(sizes.groups, sizes.group_rank, -1))
    return Attended(linear(low.flatten(1), weights[f"{prefix}o_b_proj.weight"]), stored, kept)


def streams_layer(
    weights: Weights, prefix: str, shape: LlamaShape, ratio: int, x: Tensor, tokens: Tensor, at: Standing
) -> tuple[Tensor, Attended]:
    """A layer over streams x [R, S, H] of rows that consume tokens [R] -> (x, what attention stores)."""
    sizes, eps = sizes_of(shape), shape.rms_norm_eps
    if shape.experts is None:
        raise ValueError("layers of this kind have experts")
    read, give, mix = mix_streams(weights, f"{prefix}attn_hc.", sizes, x, eps)
    inner = rms_norm((read[..., None] * x).sum(1), weights[f"{prefix}input_layernorm.weight"], eps)
    part = attention(weights, f"{prefix}self_attn.", shape, ratio, inner, at)
    x = give[..., None] * part.output[:, None] + torch.einsum("rji,rjh->rih", mix, x)
    read, give, mix = mix_streams(weights, f"{prefix}ffn_hc.", sizes, x, eps)
    inner = rms_norm((read[..., None] * x).sum(1), weights[f"{prefix}post_attention_layernorm.weight"], eps)
    fed = experts(weights, f"{prefix}mlp.", shape.experts, inner, tokens)
    return give[..., None] * fed[:, None] + torch.einsum("rji,rjh->rih", mix, x), part


def streams_target(weights: Weights, shape: LlamaShape, tokens: Tensor, lengths: Sequence[int]) -> TargetRows:
    """The target over tokens [T], sequences of these lengths one after the other. What a draft is handed is [T, S*H]."""
    sizes = sizes_of(shape)
    _, positions, sees = side_by_side(lengths)
    x = weights["model.embed_tokens.weight"][tokens][:, None].repeat(1, sizes.streams, 1)  # [T, S, H]
    stored, kept = [], []
    for layer, ratio in enumerate(sizes.ratios):
        x, part = streams_layer(weights, f"model.layers.{layer}.", shape, ratio, x, tokens, Standing(positions, sees, lengths))
        stored.append(pad(part.stored, (0, sizes.stored(shape.head_dim) - part.stored.shape[-1])))
        kept.append(part.kept)
    joined = join_streams(weights, "model.hc_head.", sizes, x, shape.rms_norm_eps)
    normed = rms_norm(joined, weights["model.norm.weight"], shape.rms_norm_eps)
    keys = torch.stack(stored)  # [L, T, 1, W]
    logits = linear(normed, weights["lm_head.weight"])
    return TargetRows(x.flatten(1), joined, normed, logits, keys, keys[..., :0], compressors=tuple(kept))
