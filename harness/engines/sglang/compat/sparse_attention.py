"""DeepSeek Sparse Attention (DSA: DeepSeek-V3.2) on a CPU: latent attention to rows that an indexer chooses.

SGLang's own backend plans and dispatches, its own torch computes the index scores and the choice, its own pools store. In
place of its GPU kernels: torch, from what each must do. SGLang's torch rounds products of index scores to bfloat16, which no
GPU's kernel does: it keeps float32 here. Intel's branches of the indexer are taken, which call no kernel that
plans others. Rows are stored in the type that the model computes in; on a GPU they are bfloat16 or FP8. Called by boot.py for
recipes with an indexer on a CPU. Seen on 0.5.23.
"""

import functools
import importlib
import os
import sys
import types
from typing import Any

import torch
from torch import Tensor

from eagletwin.harness.core.patch import Edit
from eagletwin.harness.engines.inside import patches
from eagletwin.harness.engines.inside.blame import NotDriven

from ..graphs import tape
from ..stand_ins import flash_attention
from .attention import store_latent_rows_by_triton

BACKEND = "dsa"
_INDEXER = "sglang.srt.layers.attention.dsa.dsa_indexer"
_ATTENTION = "sglang.srt.layers.attention.dsa_backend"
_SCORES = "sglang.srt.layers.attention.dsa.utils"
_PAGED = "sglang.srt.layers.attention.dsv4.indexer"
_STORE = "sglang.kernels.ops.kvcache.dsa_index_k_cache"
_FLASH_MLA = "sglang.kernels.ops.attention.flash_mla_interface"
_FP8_LARGEST = 448.0  # of e4m3
_SMALLEST = 1e-4  # what SGLang's kernel takes for the largest of a row of zeros

_EDITS = (
    Edit(
        target=f"{_INDEXER}.Indexer._get_topk_ragged",
        match='assert device_index is not None, "q_fp8 must be on an indexed CUDA device"',
        replacement="device_index = device_index or 0",
    ),
    Edit(
        target=f"{_ATTENTION}.DeepseekSparseAttnBackend.set_dsa_prefill_impl",
        match="device_sm = get_device_sm()",
        replacement="device_sm = 90",
    ),
    Edit(
        target="sglang.kernels.ops.attention.pad.seqlens_expand_triton",
        match="assert extend_seq_lens.is_cuda\n    assert seq_lens.is_cuda",
        replacement="pass",
    ),
    *(
        Edit(target=target, match=f"{match}.to(torch.bfloat16)", replacement=f"{match}.float()")
        for target, matches in (
            (f"{_SCORES}._fp8_mqa_logits_torch", ("q = q_fp8", "reshape(num_kv, head_dim)")),
            (f"{_PAGED}.fp8_paged_mqa_logits_torch", ("kv_values_fp8", "q_fp8[:, 0]")),
        )
        for match in matches
    ),
    # e4m3 is moved as bytes: the runtime of kernels on a CPU knows no such numbers
    Edit(
        target=f"{_STORE}._set_k_and_s_triton",
        match="buf_fp8 = buf.view(torch.float8_e4m3fn)",
        replacement="buf_fp8, index_k = buf, index_k.view(torch.uint8)",
    ),
)


def run_on_cpu(shims: list[str]) -> None:
    """Before the arguments of a server are resolved. Raises NotDriven for a release of which this is not known."""
    os.environ["SGLANG_FP8_PAGED_MQA_LOGITS_TORCH"] = "1"
    indexer: Any
    attention: Any
    hook: Any
    scores: Any
    store: Any
    quantize: Any
    try:
        indexer, attention = importlib.import_module(_INDEXER), importlib.import_module(_ATTENTION)
        hook = importlib.import_module("sglang.srt.arg_groups.model_hook")
        scores = importlib.import_module(_SCORES)
        store = importlib.import_module(_STORE)
        quantize = importlib.import_module("sglang.kernels.ops.quantization.act_quant_triton")
        for edit in _EDITS:
            patches.rewrite(edit)
    except (ModuleNotFoundError, patches.PatchFailed) as error:
        raise NotDriven(f"DSA on a CPU: this release has it otherwise (0.5.23 is known): {error}") from error
    torch.cuda.get_device_capability = lambda *_, **__: (9, 0)
    hook._dsa_kv_cache_dtype_default = lambda view: {}
    indexer.Indexer.forward_native = indexer.Indexer.forward_cuda
    indexer._is_xpu = True
    indexer.ReplicatedLinear = _in_the_type_of_the_model(indexer.ReplicatedLinear)
    indexer.rotate_activation = tape.opaque(hadamard)
    indexer.sgl_fp8_mqa_logits = scores._fp8_mqa_logits_torch
    indexer.sgl_fp8_paged_mqa_logits = tape.opaque(_with_one_query(scores._fp8_paged_mqa_logits_torch))
    quantize.act_quant = tape.opaque(to_fp8)
    store._get_k_and_s_triton = gather_keys
    attention.flash_attn_with_kvcache = tape.opaque(attend_to_chosen)
    attention.flash_attn_varlen_func = flash_attention.flash_attn_varlen_func
    _stand_in_for_flash_mla()
    store_latent_rows_by_triton(shims)
    shims += [
        "torch.cuda.get_device_capability: 9.0, for the branches of DSA",
        "model_hook._dsa_kv_cache_dtype_default: rows are stored in the model's type",
        "Indexer.forward_native: forward_cuda, in Intel's branches, with SGLang's own torch for index scores",
        "_fp8_mqa_logits_torch, fp8_paged_mqa_logits_torch: products in float32, not bfloat16",
        "Indexer.weights_proj: in the model's type",
        "Indexer._get_topk_ragged, seqlens_expand_triton: no GPU asserted",
        "_set_k_and_s_triton: e4m3 as bytes",
        "rotate_activation, act_quant, _get_k_and_s_triton, flash_attn_with_kvcache, flash_mla_sparse_fwd: torch",
    ]


def _stand_in_for_flash_mla() -> None:
    """SGLang's interface to it, which imports the package."""
    module: Any = types.ModuleType(_FLASH_MLA)
    module.flash_mla_sparse_fwd = tape.opaque(attend_to_listed)
    sys.modules[_FLASH_MLA] = module


def _in_the_type_of_the_model(layer: Any) -> Any:
    def make(*args: Any, params_dtype: Any = None, **kwargs: Any) -> Any:  # noqa: ARG001
        return layer(*args, **kwargs)

    return make


def _with_one_query(scores: Any) -> Any:
    """As DeepGEMM's has it: q [R, 1, H, D]."""

    def one_query(q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found: Tensor = scores(q.unsqueeze(1), *args, **kwargs)
        return found

    return one_query


@functools.lru_cache
def _signs(width: int) -> Tensor:
    """Hadamard's matrix [D, D] in Sylvester's order."""
    made = torch.ones(1, 1)
    while len(made) < width:
        made = torch.cat([torch.cat([made, made], 1), torch.cat([made, -made], 1)])
    return made


def hadamard(x: Tensor) -> Tensor:
    """x [.., D] times Hadamard's matrix, which keeps lengths."""
    width = x.shape[-1]
    turned: Tensor = x @ (_signs(width).to(x.dtype) * width**-0.5)
    return turned


def to_fp8(x: Tensor, block_size: int = 128, scale_fmt: str | None = None) -> tuple[Tensor, Tensor]:
    """x [.., D] in e4m3 and the scale of each block [.., D / block_size]: of a format that has powers of two alone, the next
    larger one."""
    blocks = x.float().view(*x.shape[:-1], -1, block_size)
    scale = blocks.abs().amax(-1).clamp_min(_SMALLEST) / _FP8_LARGEST
    if scale_fmt is not None:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    codes = (blocks / scale[..., None]).clamp(-_FP8_LARGEST, _FP8_LARGEST)
    return codes.flatten(-2).to(torch.float8_e4m3fn), scale


def gather_keys(
    buf: Tensor,
    page_indices: Tensor,
    seq_lens: Tensor,
    seq_len_sum: int,
    max_seq_len: int,  # noqa: ARG001
    page_size: int,
    index_head_dim: int,
) -> tuple[Tensor, Tensor]:
    """Stored keys of all sequences, one after another, as bytes [n, D], and their scales [n, 4].

    SGLang's kernel sums up lengths that a masked load leaves out, which are not defined."""
    order = [torch.arange(length) for length in seq_lens.tolist()]
    pages = torch.cat([page_indices[n, at // page_size].long() for n, at in enumerate(order)])[:seq_len_sum]
    within = torch.cat(order)[:seq_len_sum] % page_size
    parts = buf[:, : page_size * index_head_dim], buf[:, page_size * index_head_dim :]
    keys, scales = (part.reshape(len(buf), page_size, -1)[pages, within].contiguous() for part in parts)
    return keys, scales


def attend_to_chosen(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qv: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    softmax_scale: float,
    **_: Any,
) -> Tensor:
    """FlashAttention 3 as DSA calls it: each row is a sequence of one query, and its pages of one slot are its choice."""
    order = torch.arange(page_table.shape[1])
    slots = torch.where(order < cache_seqlens[:, None], page_table.long(), -1)
    stored = torch.cat([v_cache.flatten(1), k_cache.flatten(1)], -1)  # [slots, C + P]
    return _attend(torch.cat([qv, q], -1), stored, slots, softmax_scale, v_cache.shape[-1])


def attend_to_listed(q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, d_v: int, **_: Any) -> tuple[Tensor, None, None]:
    """FlashMLA's sparse prefill: q [T, N, C + P], indices [T, 1, K], of which -1 is none."""
    return _attend(q, kv.flatten(1), indices[:, 0].long(), sm_scale, d_v), None, None


def _attend(query: Tensor, stored: Tensor, slots: Tensor, scale: float, width: int) -> Tensor:
    """query [T, N, D] over stored [S, D] at slots [T, K]; values are the first `width` of a row."""
    rows = stored[slots.clamp_min(0)]  # [T, K, D]
    score = torch.einsum("tnd,tkd->tnk", query, rows) * scale
    weight = score.masked_fill((slots < 0)[:, None], -torch.inf).softmax(-1)
    return torch.einsum("tnk,tkd->tnd", weight.nan_to_num(0.0), rows[..., :width])
