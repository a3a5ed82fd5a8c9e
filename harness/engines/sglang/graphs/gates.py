"""The branches that SGLang takes for tensors on a GPU, taken for those of a CPU where Triton or torch stand after them.

`Tensor.is_cuda` is true where one of these modules asks for it, and nowhere else; their own flags are set. GATES says of each
place where speculative, scheduling, caching and capturing code asks for the device whether it is open, and why not.

Kernels of CUDA that write over what they are given do so here, too.
"""

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from eagletwin.harness.engines.inside.blame import hand_on

from ..compat import attention
from . import streams

_SPECULATIVE = "sglang.srt.speculative"
TENSORS = frozenset(
    (
        *(f"{_SPECULATIVE}.{name}" for name in ("eagle_worker_common", "eagle_worker_v2", "eagle_utils", "spec_utils")),
        "sglang.srt.mem_cache.kv_index_translator",
        "sglang.srt.model_executor.runner_utils.buffers",
        "sglang.srt.model_executor.cuda_graph_buffer_registry",
    )
)
FLAGS = (f"{_SPECULATIVE}.eagle_worker_v2", "sglang.srt.managers.overlap_utils")

_CAPTURE = "open: graphs/install.py, where a case has graphs"
_FLAG = "open: the module's flag"
_TENSOR = "open: Tensor.is_cuda"
_CPP = "closed: C++, for which there is no stand-in: SGLang's own code in torch runs"
_OTHERS = "closed: no case has it"
_IMPORT = "closed: it is asked while the module is imported, for all engines of the process"
_COPIED = "try_small_copy then asks for the device's name, and torch copies"
_MEMORY = "closed: host and device are one memory here"
# (module below sglang.srt, function; empty: the module itself) -> what becomes of its gate
GATES: dict[tuple[str, str], str] = {
    ("speculative.eagle_worker_common", "prepare_for_draft_extend"): _TENSOR,
    ("speculative.eagle_worker_common", "prepare_for_draft"): _TENSOR,
    ("speculative.eagle_worker_common", "build_eagle_verify_input"): f"{_TENSOR}; Triton's backend has another mask",
    ("speculative.eagle_worker_common", "run_eagle_verify"): _TENSOR,
    ("speculative.eagle_worker_v2", ""): _FLAG,
    ("speculative.eagle_worker_v2", "EagleDraftWorker._capture_cuda_graphs"): _CAPTURE,
    ("speculative.eagle_worker_v2", "EagleDraftWorker.draft_forward"): _FLAG,
    ("speculative.eagle_worker_v2", "EagleDraftWorker._draft_extend_for_decode"): _TENSOR,
    ("speculative.eagle_utils", ""): _IMPORT,
    ("speculative.eagle_utils", "_can_use_sparse_uno_tree_target_sampling"): "closed: UNO, another algorithm",
    ("speculative.eagle_utils", "eagle_sample"): f"{_TENSOR}; no case has a watermark",
    ("speculative.frozen_kv_mtp_worker_v2", "FrozenKVMTPDraftWorker._capture_cuda_graphs"): _CAPTURE,
    ("speculative.spec_utils", ""): _IMPORT,
    ("speculative.spec_utils", "record_stream_each"): _TENSOR,
    ("speculative.spec_utils", "generate_simulated_accept_index"): "closed: SGLANG_SIMULATE_ACC_LEN, for benchmarks",
    ("speculative.spec_utils", "GrammarTree.from_device"): _MEMORY,
    ("speculative.spec_utils", "_verify_commit_step_indices"): _TENSOR,
    ("managers.scheduler", "Scheduler.init_model_worker"): "closed: a word of a log",
    ("managers.scheduler", "Scheduler.run_event_loop"): "open: SGLANG_ENABLE_WAR_BARRIER; its streams are distinct anyway",
    ("managers.overlap_utils", ""): _FLAG,
    ("managers.overlap_utils", "resolve_forward_inputs"): _MEMORY,
    ("managers.overlap_utils", "ConfidenceRelay._lazy_init"): "closed: DSpark, another algorithm",
    ("managers.overlap_utils", "FutureMap.__init__"): f"{_FLAG}; no memory is pinned",
    ("managers.overlap_utils", "FutureMap._resolve_spec_extras"): _MEMORY,
    ("managers.schedule_batch", "ScheduleBatch.prepare_for_extend"): _OTHERS,
    ("mem_cache.allocation", ""): _IMPORT,
    ("mem_cache.allocation", "_alloc_page_size"): _OTHERS,
    ("mem_cache.kv_index_translator", "KVIndexTranslator.plan_uniform_extend"): _TENSOR,
    ("mem_cache.memory_pool", ""): _IMPORT,
    ("mem_cache.memory_pool", "_set_kv_buffer_impl"): _CPP,
    ("mem_cache.memory_pool", "_resolve_fused_scale"): _OTHERS,
    ("mem_cache.memory_pool", "MambaPool._conv_fuse_ok"): "closed: bfloat16 alone",
    ("mem_cache.memory_pool", "MHATokenToKVPool.__init__"): "closed: a second stream for the copy of V",
    ("mem_cache.memory_pool", "MHATokenToKVPool.set_kv_buffer"): _OTHERS,
    ("mem_cache.memory_pool", "MHATokenToKVPool.set_kv_buffer_prefix_valid"): _OTHERS,
    ("mem_cache.memory_pool", "MHATokenToKVPoolMXFP8.set_kv_buffer"): _OTHERS,
    ("mem_cache.memory_pool", "get_minimax_sparse_index_dtype"): _OTHERS,
    ("mem_cache.memory_pool", "MiniMaxSparseKVPool._can_fuse_kv_index_store"): _OTHERS,
    ("layers.attention.triton_backend", ""): _IMPORT,
    ("layers.attention.triton_backend", "TritonAttnBackend.__init__"): "closed: an option of the compiler",
    ("model_executor.model_runner", "ModelRunner.load_model"): "closed: types of old GPUs, threads",
    ("model_executor.model_runner", "ModelRunner._forward_raw"): _CAPTURE,
    ("model_executor.cuda_graph_buffer_registry", "_grouped_foreach_copy_"): f"{_TENSOR}; {_COPIED}",
    ("model_executor.cuda_graph_buffer_registry", "CudaGraphBufferRegistry.fill_from"): _MEMORY,
    ("model_executor.runner_utils.pool", "graph_pool_borrow_enabled"): "closed: memory that a graph lends is not modelled",
    ("model_executor.runner_backend_utils.weak_ref_tensor", ""): _IMPORT,
    ("model_executor.runner_utils.shared_read_event", "make_external_event"): _MEMORY,
    ("model_executor.runner_utils.buffers", "_grouped_foreach_copy_"): f"{_TENSOR}; {_COPIED}",
    ("model_executor.runner.eager_runner", "EagerRunner.__init__"): _OTHERS,
    ("model_executor.runner.decode_cuda_graph_runner", "DecodeCudaGraphRunner._wants_early_verify_metadata"): _OTHERS,
    ("model_executor.runner.base_runner", "BaseRunner._warmup"): "closed: it tunes kernels",
    ("model_executor.runner.flashinfer_autotune", "should_run_flashinfer_autotune"): "closed: it tunes kernels",
    ("model_executor.runner.prefill_cuda_graph_runner", "PrefillCudaGraphRunner.can_replay_locally"): _CAPTURE,
    ("model_executor.runner.prefill_cuda_graph_runner", "PrefillCudaGraphRunner.load_batch"): _CAPTURE,
    ("model_executor.model_runner_components.cuda_graph_setup", "refresh_deep_gemm_layout_memory_budget"): _OTHERS,
    ("model_executor.model_runner_components.cuda_graph_setup", "capture_decode_graph"): _CAPTURE,
}


# What captures graphs, and on what -> whether a CPU has it
RUNNERS: dict[str, str] = {
    "DecodeCudaGraphRunner": "open: target verify",
    "EAGLEDraftCudaGraphRunner": "open: draft decode",
    "EAGLEDraftExtendCudaGraphRunner": "open: draft extend",
    "MultiLayerEagleDraftExtendCudaGraphRunner": "open: a layer's draft extend",
    "MultiLayerEagleMultiStepDraftExtendCudaGraphRunner": "open: all layers, a graph each",
    "OneGraphMultiLayerEagleMultiStepDraftExtendCudaGraphRunner": "open: all layers in one graph, with FlashAttention",
    "FrozenKVMTPCudaGraphRunner": "open: a draft that reads the target's rows",
    "PrefillCudaGraphRunner": "open: prefill",
    "UnoDecodeCudaGraphRunner": "closed: UNO, another algorithm",
    "RowBucketGraphRunner": "closed: no model here has it",
    "BaseCudaGraphRunner": "open: what they have in common",
    "CPUGraphRunner": "closed: torch.compile on a CPU",
    "BaseCudaGraphBackend": "open: what they have in common",
    "FullCudaGraphBackend": "open: one graph a size",
    "BreakableCudaGraphBackend": "open: prefill in pieces, with eager breaks",
    "TcPiecewiseCudaGraphBackend": "closed: torch.compile",
}


class _IsCuda:
    """In the place of Tensor.is_cuda."""

    def __init__(self) -> None:
        self._real: Any = torch._C.TensorBase.is_cuda

    def __get__(self, tensor: Any, owner: Any = None) -> Any:
        if tensor is None:
            return self
        return sys._getframe(1).f_globals.get("__name__") in TENSORS or self._real.__get__(tensor, owner)


# Modules below sglang.srt.layers, and their classes whose kernel on CUDA leaves its results in its arguments, of these numbers
_IN_PLACE = {
    "layernorm": (("RMSNorm", "GemmaRMSNorm", "Gemma3RMSNorm"), (0, 1)),  # x and the residual; x alone is left as it is
    "rotary_embedding.base": (("RotaryEmbedding",), (1, 2)),  # query and key
}


def write_over(method: Callable[..., Any], places: tuple[int, int]) -> Callable[..., Any]:
    """A method in torch that gives two tensors, with these in the memory of the arguments of these numbers, as CUDA's does."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = hand_on(method, self, *args, **kwargs)
        given = [*args, *kwargs.values()]  # SGLang names none that comes before these
        if not isinstance(result, tuple) or any(one is not None for one in given[places[1] + 1 :]):
            return result
        kept: list[Tensor] = [given[place] for place in places]
        for memory, value in zip(kept, result, strict=True):
            memory.copy_(value)
        return tuple(kept)

    return call


def _write_over_arguments(shims: list[str]) -> None:
    for name, (classes, places) in _IN_PLACE.items():
        with contextlib.suppress(ImportError):  # an older release keeps them elsewhere
            layers: Any = importlib.import_module(f"sglang.srt.layers.{name}")
            for one in filter(None, (getattr(layers, each, None) for each in classes)):
                one.forward_native = write_over(one.forward_native, places)
                shims.append(f"{one.__name__}.forward_native: its results are in its arguments, as CUDA's are")


def take_cuda_branches(shims: list[str]) -> None:
    """Before a scheduler is built, and before graphs are prepared, which make nodes of what writes over its arguments."""
    _write_over_arguments(shims)
    torch.Tensor.is_cuda = _IsCuda()  # type: ignore[assignment]
    for name in FLAGS:
        importlib.import_module(name)._is_cuda = True  # type: ignore[attr-defined]
    attention.leave_unpinned(shims)
    streams.install(shims)
    os.environ["SGLANG_ENABLE_WAR_BARRIER"] = "1"
    shims.append(f"Tensor.is_cuda is true in {', '.join(sorted(TENSORS))}")
    shims.append(f"_is_cuda is true in {', '.join(FLAGS)}")
