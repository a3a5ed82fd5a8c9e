"""Where the Triton kernels live that cases launch, and pools as they are made. Each generation of SGLang has moved them.

SGLang imports four times as many modules with kernels; what is not named here is compiled when it is launched, in each
process anew. Seen on 0.5.13, 0.5.15, 0.5.16 and 0.5.23.
"""

import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from eagletwin.harness.engines.inside.blame import hand_on
from eagletwin.harness.engines.triton_cpu import LivePools

# What the backends of DeepSeek-V4 and of DSA want to be built with: where configuration lies, and which sizes a pool is given.

_CONTEXT = "sglang.srt.runtime_context"
_ONE_RANK = {"attn_tp_size": 1, "attn_tp_rank": 0, "attn_cp_size": 1, "attn_cp_rank": 0}


@contextlib.contextmanager
def draft_configured(**fields: Any) -> Iterator[Any]:
    """The release's server arguments with those of these fields that it has, where its classes look for them; one rank.

    Up to 0.5.14 they are a global of server_args, then a slot of the runtime context, and since 0.5.16 it takes single fields.
    """
    context = importlib.import_module(_CONTEXT) if importlib.util.find_spec(_CONTEXT) is not None else None
    module = importlib.import_module("sglang.srt.server_args")
    known = getattr(module.ServerArgs, "__struct_fields__", ()) or module.ServerArgs.__dataclass_fields__
    fields = {name: value for name, value in fields.items() if name in known}
    with contextlib.ExitStack() as stack:
        if context is not None:
            stack.enter_context(context.get_parallel().override(**_ONE_RANK))
        if context is not None and hasattr(context.get_context(), "override_server_args"):
            override = context.get_context().override_server_args(**fields)
            stack.callback(override.restore)
            yield override.install()
            return
        arguments = SimpleNamespace(**_defaults(module.ServerArgs) | fields)
        slot = context is not None and hasattr(context.get_context(), "_server_args")
        holder, name = (context.get_context(), "_server_args") if context and slot else (module, "_global_server_args")
        stack.callback(setattr, holder, name, getattr(holder, name))
        setattr(holder, name, arguments)
        yield arguments


def _defaults(arguments: type) -> dict[str, Any]:
    """What a field holds that nobody sets. ServerArgs itself looks at the machine when it is made."""
    return {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in dataclasses.fields(arguments)
    }


def deepseek_v4_pool(kind: type, page_size: int, slots: int, requests: int) -> Any:
    """A DeepSeekV4TokenToKVPool of one draft layer, as NextN's: it compresses nothing, and attends to a window.

    slots: of the pool of all positions, and of that of the window.
    """
    sizes = {"max_num_reqs": requests, "swa_size": slots, "c4_size": page_size, "c128_size": page_size, "full_size": slots}
    states = {"c4_state_pool_size": requests, "c128_state_pool_size": requests, "state_dtype": torch.float32}
    states |= {"c4_state_dtype": torch.float32, "c128_state_dtype": torch.float32}
    model = {"qk_nope_head_dim": 448, "qk_rope_head_dim": 64, "indexer_head_dim": 128, "dtype": torch.float8_e4m3fn}
    layers = {"layer_num": 1, "compression_ratios": [0], "is_draft_worker": True}
    where = {"page_size": page_size, "swa_page_size": 128, "device": "cpu", "enable_memory_saver": False}
    known = inspect.signature(kind).parameters
    given: dict[str, Any] = {**sizes, **states, **model, **layers, **where}
    return kind(**{name: value for name, value in given.items() if name in known})


DSA_KERNELS = {
    **{f"{name}_prefill_backend": "flashmla_sparse" for name in ("dsa", "nsa")},
    **{f"{name}_decode_backend": "fa3" for name in ("dsa", "nsa")},  # its plan has no schedule, which a GPU would make
    "dsa_topk_backend": "torch",
    "speculative_dsa_topk_backend": "torch",
}


def dsa_backend() -> tuple[ModuleType, str] | None:
    """(module, name of the multi-step class); None: the release has none. Up to 0.5.12.post1 DSA is called NSA."""
    for name, kind in (("dsa", "DeepseekSparseAttnMultiStepBackend"), ("nsa", "NativeSparseAttnMultiStepBackend")):
        module = f"sglang.srt.layers.attention.{name}_backend"
        if importlib.util.find_spec(module) is not None:
            return importlib.import_module(module), kind
    return None


@contextlib.contextmanager
def dsa_without_a_gpu(module: ModuleType) -> Iterator[None]:
    """With CUDA's generation answered, which the backend asks for; Hopper's. Without the schedule of top-k, which 0.5.15.post1
    compiles whatever does it. Up to 0.5.13.post1 with one rank, too: there its groups are asked."""
    folder, _, name = module.__name__.rpartition(".")
    utils = importlib.import_module(f"{folder}.{name.removesuffix('_backend')}.utils")
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(torch.cuda, "get_device_capability", lambda *_: (9, 0)))
        for holder, size in product((module, utils), ("get_attention_tp_size", "get_attention_cp_size")):
            if hasattr(holder, size):
                stack.enter_context(patch.object(holder, size, lambda: 1))
        backend = getattr(module, "DeepseekSparseAttnBackend", None)
        if hasattr(backend, "_build_topk_v2_plan"):
            stack.enter_context(patch.object(backend, "_build_topk_v2_plan", lambda *_: None))
        yield


@contextlib.contextmanager
def slots_side_by_side(metadata: type) -> Iterator[None]:
    """A DSV4AttnMetadata whose plan of compression gets a step's slots side by side.

    Up to 0.5.20 a draft plans compression, although no layer of it compresses: by a kernel that reads slots without their
    stride, and those of a step are a view of all steps'. Its results serve nothing there; the access ends the run here.
    """
    if any(field.name == "present_ratios" for field in dataclasses.fields(metadata)):
        yield
        return
    original = metadata.init_compression_metadata  # type: ignore[attr-defined]

    def side_by_side(self: Any, *args: Any, **kwargs: Any) -> None:
        self.raw_out_loc = self.raw_out_loc.contiguous()
        hand_on(original, self, *args, **kwargs)

    with patch.object(metadata, "init_compression_metadata", side_by_side):
        yield


@contextlib.contextmanager
def as_on_hopper() -> Iterator[None]:
    """Without DeepGEMM's indexer, which no Hopper has; 0.5.21 asks CUDA for its generation, which ends a process without it."""
    indexer = sys.modules.get("sglang.srt.layers.attention.dsv4.v41_indexer")
    if indexer is None:
        yield
        return
    with patch.object(indexer, "is_sm100_or_newer", lambda: False):
        yield


_LAUNCHED = (
    # from 0.5.16 on
    "sglang.kernels.ops.attention.decode_attention",
    "sglang.kernels.ops.attention.extend_attention",
    "sglang.kernels.ops.attention.kv_indices",
    "sglang.kernels.ops.attention.position",
    "sglang.kernels.ops.kvcache.cache_move",
    "sglang.kernels.ops.kvcache.kv_indices",
    "sglang.kernels.ops.memory.allocator",
    "sglang.kernels.ops.memory.common",
    "sglang.kernels.ops.speculative.cache_locs",
    "sglang.kernels.ops.speculative.eagle",
    "sglang.kernels.ops.speculative.multi_layer_eagle",
    "sglang.kernels.ops.speculative.reject_sampling",
    "sglang.kernels.ops.speculative.row_argmax",
    "sglang.kernels.ops.speculative.spec_tree",
    "sglang.srt.mem_cache.allocation",
    # 0.5.13 to 0.5.15.post1
    "sglang.srt.layers.attention.triton_ops.decode_attention",
    "sglang.srt.layers.attention.triton_ops.extend_attention",
    "sglang.srt.layers.attention.triton_ops.kv_indices",
    "sglang.srt.mem_cache.triton_ops.allocator",
    "sglang.srt.mem_cache.triton_ops.cache_move",
    "sglang.srt.mem_cache.triton_ops.common",
    "sglang.srt.model_executor.triton_ops.position",
    "sglang.srt.speculative.triton_ops.cache_locs",
    "sglang.srt.speculative.triton_ops.eagle",
    "sglang.srt.speculative.triton_ops.multi_layer_eagle",
    "sglang.srt.speculative.triton_ops.spec_tree",
)
# And by layers that keep a state.
_OF_STATES = (
    "sglang.kernels.ops.attention.linear.fused_gdn_gating",
    "sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent",
    "sglang.kernels.ops.mamba.causal_conv1d_triton",
    "sglang.kernels.ops.mamba.mamba_state_scatter_triton",
)


def launched_modules(*, states: bool = False) -> list[ModuleType]:
    """Those of them that this SGLang has. Attention's are imported by a backend as it is made, which is after the fork.

    states: those of layers that keep a state, and no others"""
    found = []
    for name in _OF_STATES if states else _LAUNCHED:
        with contextlib.suppress(ModuleNotFoundError):
            found.append(importlib.import_module(name))
    return found


# A kernel that reaches cached prefixes by raw address: these are registered with the fast runtime.
#
# Up to 0.5.17 on a CPU too, later on other machines only, write_cache_indices gives its kernel the addresses of the requests'
# prefix tensors. They are at the kernel's disposal for as long as that call lasts.

_NAME = "write_cache_indices"
_MODULES = ("sglang.srt.mem_cache.allocation", "sglang.srt.mem_cache.common")  # from 0.5.16 on, before


def register_in(pools: LivePools) -> None:
    """From now on kernels reach the prefixes that they are given, and no other memory."""
    for module in map(sys.modules.get, _MODULES):
        original = getattr(module, _NAME, None)
        if original is not None:
            setattr(module, _NAME, _registering(original, pools))


def _registering(original: Any, pools: LivePools) -> Any:
    signature = inspect.signature(original)

    def write(*args: Any, **kwargs: Any) -> Any:
        prefixes = hand_on(signature.bind, *args, **kwargs).arguments["prefix_tensors"]
        names = {f"prefix of request {n}": prefix for n, prefix in enumerate(prefixes) if len(prefix)}
        for name, prefix in names.items():
            pools.register(name, prefix)
        try:
            return hand_on(original, *args, **kwargs)
        finally:
            for name in names:
                pools.forget(name)

    return write
