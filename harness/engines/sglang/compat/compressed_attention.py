"""DeepSeek-V4's backend: on a GPU what a host without TileLang needs, and on a CPU torch in place of its CUDA kernels.

SGLang's own backend plans and dispatches there, its own pools store, and its own torch scores and chooses compressed rows. In
place of what it compiles with nvcc: torch, from what each must do: the plans of the compressors, their sums, the norms with
rotary embedding and the stores in FP8, and FlashMLA's attention. Called by boot.py for recipes with compressed rows. Seen on
0.5.23.
"""

import functools
import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from eagletwin.harness.core.patch import Edit
from eagletwin.harness.engines.inside import patches
from eagletwin.harness.engines.inside.blame import NotDriven

from .sparse_attention import hadamard

BACKEND = "dsv4"
PLAIN, ROPE, ROW, SCALES = 448, 64, 576, 8  # of a stored row: numbers in FP8, in bfloat16, bytes of both, and of scales
_LARGEST = 448.0  # of e4m3
_LEAST = 1e-4  # what SGLang's kernels take for the largest of a block of zeros
_MHC = "sglang.kernels.ops.layernorm.mhc"
_BACKEND = "sglang.srt.layers.attention.deepseek_v4_backend"
_COMPRESS = "sglang.kernels.ops.attention.dsv4.compress"
_NORMS = "sglang.kernels.ops.attention.dsv4.norm_rope"
_CLAMPED = "sglang.kernels.ops.activation.silu_and_mul_clamp"

_EDITS = (
    Edit(
        target="sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator.configure",
        match="if current_platform.is_cpu() and self.kv_cache_dtype == torch.float8_e4m3fn:",
        replacement="if False:",
    ),
)


def arguments(device: str) -> dict[str, str]:
    """Fields of ServerArgs: on a CPU torch chooses compressed rows."""
    return {"dsa_topk_backend": "torch"} if device == "cpu" else {}


def mix_with_triton(shims: list[str]) -> None:
    """Have Sinkhorn's iterations run in SGLang's Triton kernel, in place of TileLang's. Raises NotDriven for a release in
    which this is not known."""
    try:
        module: Any = importlib.import_module(_MHC)
        module.hc_split_sinkhorn = module._hc_split_sinkhorn_triton
    except (ModuleNotFoundError, AttributeError) as error:
        raise NotDriven(f"DeepSeek-V4: this release has it otherwise (0.5.23 is known): {error}") from error
    shims.append("mhc.hc_split_sinkhorn: SGLang's Triton kernel, not TileLang's")


def run_on_cpu(shims: list[str]) -> None:
    """Before the arguments of a server are resolved. Raises NotDriven for a release in which this is not known."""
    os.environ.update(SGLANG_OPT_USE_FUSED_HASH_TOPK="0", SGLANG_OPT_FLASHMLA_SPARSE_PREFILL="0")
    backend: Any
    compress: Any
    try:
        for edit in _EDITS:
            patches.rewrite(edit)
        backend, compress = importlib.import_module(_BACKEND), importlib.import_module(_COMPRESS)
        for name in (_NORMS, _CLAMPED):
            importlib.import_module(name)
        decode, prefill = compress.CompressorDecodePlan, compress.CompressorPrefillPlan
    except (ModuleNotFoundError, AttributeError, patches.PatchFailed) as error:
        raise NotDriven(f"DeepSeek-V4 on a CPU: this release has it otherwise (0.5.23 is known): {error}") from error
    cpu: Any = torch.cpu
    cpu.empty_cache = lambda: None
    decode.generate = staticmethod(functools.partial(plan_decode, decode))
    prefill.generate = staticmethod(functools.partial(plan_prefill, prefill))
    kind = backend.DeepseekV4AttnBackend
    kind._move_to_device = lambda self, values: torch.tensor(values, dtype=torch.int32)
    kind._flash_mla_with_kvcache = staticmethod(attend)
    backend._create_flashmla_metadata = lambda: None
    replaced = (
        compress_forward,
        compress_norm_rope_store,
        fused_rope_inplace,
        fused_q_norm_rope,
        fused_k_norm_rope_flashmla,
        fused_q_indexer_rope_hadamard_quant,
        silu_and_mul_clamp,
    )
    for module in [module for name, module in list(sys.modules.items()) if name.startswith("sglang.")]:
        for function in replaced:
            if hasattr(module, function.__name__):
                setattr(module, function.__name__, function)
    shims += [
        "KVCacheConfigurator.configure: FP8 rows on a CPU",
        "torch.cpu.empty_cache, DeepseekV4AttnBackend._move_to_device: none, and no pinned memory",
        "CompressorDecodePlan.generate, CompressorPrefillPlan.generate, flash_mla_with_kvcache: torch",
        f"{', '.join(function.__name__ for function in replaced)}: torch",
    ]


# Plans: of each row of a batch where the compressor keeps what it needs of it, and which groups end.
#
# What is kept lies in a ring of each request (ratio 128), or of each page of the window's pool (ratio 4).


def _places(given: Mapping[str, Any], requests: Tensor, positions: Tensor) -> Tensor:
    """Where rows at positions [n] of these requests [n] are kept [n]. given: what `generate` is given."""
    positions, ring = positions.clamp_min(0), given["ring_size"]
    if given["compress_ratio"] == 128:
        in_ring: Tensor = requests * ring + positions % ring
        return in_ring
    slots = given["full_to_state"][given["req_to_token"][requests, positions].long()]
    found: Tensor = slots // given["swa_page_size"] * ring + slots % ring
    return found


def plan_decode(kind: Any, **given: Any) -> Any:
    """Of a batch with one row each: bytes [b, 16] as SGLang's kernels read them. given: what `generate` is given."""
    ratio, requests, lengths = given["compress_ratio"], given["req_pool_indices"], given["seq_lens"].long()
    own, before = (_places(given, requests, lengths - back) for back in (1, 1 + ratio))
    plan = torch.stack([lengths, own, before // ratio, own // ratio], 1)
    return kind(ratio, plan.int().view(torch.uint8))


def plan_prefill(kind: Any, **given: Any) -> Any:
    """Of a batch with several rows each: groups that end [c, 16], and rows that are kept [w, 8]. As a graph would want them,
    there are as many as rows; those at the end are none: -1. given: what `generate` is given."""
    ratio, ring, page = given["compress_ratio"], given["ring_size"], given["swa_page_size"]
    window = ratio * (2 if ratio == 4 else 1)
    spare = ring - window + 2 if ring > window else 0  # rows that a round may reject
    ends, keeps, begin = [], [], 0
    sizes = (given[name].tolist() for name in ("req_pool_indices", "seq_lens", "extend_lens"))
    for request, length, count in zip(*sizes, strict=True):
        positions = torch.arange(length - count, length)
        of_request = torch.full_like(positions, request)
        where, earlier = (_places(given, of_request, at) for at in (positions, positions - ratio))
        rows = begin + torch.arange(count)
        outside = window - (torch.arange(count) + 1).clamp_max(window)  # rows of a group that are not of this batch
        whole = torch.stack([positions + 1, rows | outside << 16, earlier // ratio, where // ratio], 1)
        ends.append(whole[(positions + 1) % ratio == 0])
        kept = positions >= min(length // ratio * ratio - (ratio if ratio == 4 else 0), length - spare)
        if ratio == 4:  # of each page the last group, for whoever goes on after it
            kept |= positions % page >= page - ratio
        keeps.append(torch.stack([rows, where], 1)[kept])
        begin += count
    plans = [torch.cat(plan).int() for plan in (ends, keeps)]
    if given.get("use_cuda_graph"):
        plans = [pad(plan, (0, 0, 0, given["num_q_tokens"] - len(plan)), value=-1) for plan in plans]
    return kind(ratio, *(plan.view(torch.uint8) for plan in plans))


# Compressors.


def compress_forward(
    kv_score_buffer: Tensor,
    kv_score_input: Tensor,
    ape: Tensor,
    plan: Any,
    *,
    head_dim: int,
    compress_ratio: int,
    out: Tensor | None = None,
    is_online: bool = False,  # noqa: ARG001
) -> Tensor:
    """Sums of groups, compact [c, D] (of a decode [b, D]); and rows are kept."""
    kept = kv_score_buffer.view(-1, kv_score_input.shape[-1])
    rows = plan[1].view(torch.int32).long()
    out = kv_score_input.new_empty((len(rows), head_dim)) if out is None else out
    if plan.is_decode:
        kept[rows[:, 1]] = kv_score_input.to(kept.dtype)
    for n, (length, packed, page_before, page) in enumerate(rows.tolist()):
        if length % compress_ratio:
            continue
        window = compress_ratio * (2 if compress_ratio == 4 else 1)
        outside, last = (window, n) if plan.is_decode else (packed >> 16 & 0xFFFF, packed & 0xFFFF)
        places = [*range(page_before * 4, page_before * 4 + 4)] if compress_ratio == 4 else []
        places += [*range(page * compress_ratio, (page + 1) * compress_ratio)]
        seen = [kept[place] if at < outside else kv_score_input[last - window + 1 + at] for at, place in enumerate(places)]
        found = torch.stack([row.to(kv_score_input.dtype) for row in seen])  # [window, 2*C*D]
        vector, score = found.float().chunk(2, -1)
        if compress_ratio == 4:
            halves = [torch.cat([part[:4, :head_dim], part[4:, head_dim:]]) for part in (vector, score)]
            vector, score = halves
        score = score + ape.view(-1, head_dim).float()
        if compress_ratio == 4 and length == 4:
            vector, score = vector[4:], score[4:]
        out[n] = (vector * score.softmax(0)).sum(0).to(out.dtype)
    if not plan.is_decode:
        keeps = plan[2].view(torch.int32).long()
        keeps = keeps[keeps[:, 1] >= 0]
        kept[keeps[:, 1]] = kv_score_input[keeps[:, 0]].to(kept.dtype)
    return out


def compress_norm_rope_store(kv: Tensor, plan: Any, *, norm_weight: Tensor, norm_eps: float, **given: Any) -> None:
    """Norm, rotary embedding by the position of a group's first row, and the store; of index keys Hadamard's matrix as well."""
    freq_cis, out_loc, kvcache, page_size = (given[name] for name in ("freq_cis", "out_loc", "kvcache", "page_size"))
    rows = plan[1].view(torch.int32).long()
    at = torch.arange(len(rows)) if plan.is_decode else rows[:, 1] & 0xFFFF
    ends = rows[:, 0] % plan.compress_ratio == 0
    made = _turned(_normed(kv, norm_eps, norm_weight), freq_cis, rows[:, 0] - plan.compress_ratio)[ends]
    slots = out_loc.long()[at[ends]]
    if not len(slots):
        return
    if kv.shape[-1] != 128:
        store_rows(made, slots, kvcache, page_size)
        return
    keys = hadamard(made)
    scale = keys.abs().amax(-1, keepdim=True).clamp_min(_LEAST) / _LARGEST
    pages, within = slots // page_size, slots % page_size
    stored = kvcache.view(torch.uint8).flatten(1)
    end = page_size * 128
    codes = (keys / scale).to(torch.float8_e4m3fn)
    stored[:, :end].view(-1, page_size, 128)[pages, within] = codes.view(torch.uint8)
    stored[:, end:].view(-1, page_size, 4)[pages, within] = scale.view(torch.uint8)


# Norms, rotary embedding, stored rows, attention.


def _normed(x: Tensor, eps: float | None, weight: Tensor | None = None) -> Tensor:
    made = x.float()
    if eps is not None:
        made = made * torch.rsqrt(made.square().mean(-1, keepdim=True) + eps)
    return made if weight is None else made * weight.float()


def _turned(x: Tensor, turns: Tensor, positions: Tensor, *, back: bool = False) -> Tensor:
    """The last numbers of x [n, .., D] turned by pairs."""
    turn = turns[positions.long()]
    turn = turn.conj() if back else turn
    while turn.dim() < x.dim():
        turn = turn.unsqueeze(1)
    width = 2 * turn.shape[-1]
    pairs = torch.view_as_complex(torch.unflatten(x[..., -width:].float(), -1, (-1, 2)).contiguous()) * turn
    return torch.cat([x[..., :-width].float(), torch.view_as_real(pairs).flatten(-2)], -1)


def fused_rope_inplace(q: Tensor, k: Tensor | None, freqs_cis: Tensor, positions: Tensor, inverse: bool = False) -> None:
    """Parts that turn, in their place."""
    for part in (q, k):
        if part is not None:
            part.copy_(_turned(part, freqs_cis, positions, back=inverse))


def fused_q_norm_rope(q: Tensor, out: Tensor, eps: float | None, freqs_cis: Tensor, positions: Tensor) -> None:
    """Each head's own norm, without a weight, and its turn."""
    out.copy_(_turned(_normed(q, eps), freqs_cis, positions))


def fused_k_norm_rope_flashmla(kv: Tensor, kv_weight: Tensor, eps: float, freqs_cis: Tensor, **given: Any) -> None:
    """Norm, turn and store of rows [n, D]; of a negative slot there is none."""
    positions, out_loc, kvcache, page_size = (given[name] for name in ("positions", "out_loc", "kvcache", "page_size"))
    made, slots = _turned(_normed(kv, eps, kv_weight), freqs_cis, positions), out_loc.long()
    store_rows(made[slots >= 0], slots[slots >= 0], kvcache, page_size)


def store_rows(rows: Tensor, slots: Tensor, cache: Tensor, page_size: int) -> None:
    """Rows [n, D] as FlashMLA reads them: FP8 in blocks of 64 and bfloat16; behind a page's rows the exponents of scales."""
    blocks = torch.unflatten(rows[:, :PLAIN].float(), -1, (-1, 64))
    exponent = torch.ceil(torch.log2(blocks.abs().amax(-1).clamp_min(_LEAST) / _LARGEST))
    codes = (blocks / torch.exp2(exponent)[..., None]).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
    numbers, scales = stored_parts(cache, page_size)
    pages, within = slots // page_size, slots % page_size
    numbers[pages, within, :PLAIN] = codes.flatten(1).view(torch.uint8)
    numbers[pages, within, PLAIN:] = rows[:, PLAIN:].bfloat16().contiguous().view(torch.uint8)
    scales[pages, within, : PLAIN // 64] = (exponent + 127).to(torch.uint8)


def stored_parts(cache: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Where rows lie [pages, P, 576], and their scales [pages, P, 8], as bytes."""
    stored = cache.view(torch.uint8).view(len(cache), -1)
    end = page_size * ROW
    parts = (stored[:, :end], ROW), (stored[:, end : end + page_size * SCALES], SCALES)
    numbers, scales = (torch.unflatten(part, 1, (page_size, width)) for part, width in parts)
    return numbers, scales


def read_rows(cache: Tensor, slots: Tensor, page_size: int) -> Tensor:
    """Stored rows [n, D], float32."""
    numbers, scales = (part[slots // page_size, slots % page_size] for part in stored_parts(cache, page_size))
    exponent = scales[:, : PLAIN // 64].float() - 127
    front = torch.unflatten(numbers[:, :PLAIN].contiguous().view(torch.float8_e4m3fn).float(), -1, (-1, 64))
    back = numbers[:, PLAIN:].contiguous().view(torch.bfloat16).float()
    return torch.cat([(front * torch.exp2(exponent)[..., None]).flatten(1), back], 1)


def attend(q: Tensor, k_cache: Tensor, head_dim_v: int, softmax_scale: float, **given: Any) -> tuple[Tensor, None]:
    """FlashMLA over listed rows of the window, and of compressed ones: q [T, 1, N, D], indices [T, 1, K]."""
    extra, sink = given.get("extra_k_cache"), given["attn_sink"]
    out = torch.zeros(*q.shape[:-1], head_dim_v, dtype=q.dtype)
    for row in range(len(q)):
        seen = [_listed(k_cache, given["indices"], given["topk_length"], row)]
        if extra is not None:
            seen.append(_listed(extra, given["extra_indices_in_kvcache"], given["extra_topk_length"], row))
        keys = torch.cat(seen)
        score = q[row, 0].float() @ keys.T * softmax_scale
        share = torch.cat([score, sink[:, None].float()], 1).softmax(-1)[:, :-1]
        out[row, 0] = (share @ keys).to(q.dtype)
    return out, None


def _listed(cache: Tensor, indices: Tensor, lengths: Tensor | None, row: int) -> Tensor:
    slots = indices[row, 0].long()
    slots = slots if lengths is None else slots[: int(lengths[row])]
    return read_rows(cache, slots[slots >= 0], cache.shape[1])


def fused_q_indexer_rope_hadamard_quant(
    q_input: Tensor, weight: Tensor, weight_scale: float, freqs_cis: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Index queries [n, h, D] in FP8, and their weights [n, h, 1] times their scales."""
    made = hadamard(_turned(q_input, freqs_cis, positions))
    scale = made.abs().amax(-1, keepdim=True).clamp_min(_LEAST) / _LARGEST
    return (made / scale).to(torch.float8_e4m3fn), weight.float()[..., None] * weight_scale * scale


def silu_and_mul_clamp(x: Tensor, out: Tensor, limit: float, *_: Any, **__: Any) -> Tensor:
    """Gate and the other part [n, 2I], clamped."""
    gate, other = x.float().chunk(2, -1)
    out.copy_(silu(gate.clamp(max=limit)) * other.clamp(-limit, limit))
    return out
