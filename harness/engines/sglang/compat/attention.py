"""Attention in releases: backend, rotary embeddings, what a layer reads with, and adapters (LoRA) on a CPU."""

import contextlib
import dataclasses
import importlib
from typing import Any

from eagletwin.harness.core.patch import Edit
from eagletwin.harness.engines.inside import patches
from eagletwin.harness.engines.inside.blame import hand_on

from ..graphs import tape
from ..stand_ins import flash_attention

# SGLang's adapters (LoRA) on a CPU: they ask for pinned memory, which torch has none of without a GPU, and `csgmv` looks for
# block sizes by the name of the GPU.
#
# Called by boot.py for cases with adapters on a CPU. Seen on 0.5.20 and 0.5.23.

_FACTORIES = ("arange", "empty", "tensor", "zeros")
# Where a release has the kernels of adapters: 0.5.22 and later, 0.5.16 to 0.5.21, those before.
_HOMES = ("sglang.kernels.ops.lora.dense", "sglang.kernels.ops.gemm", "sglang.srt.lora.triton_ops")


def run_adapters_on_cpu(shims: list[str]) -> None:
    """Let torch make and keep tensors unpinned that are to be pinned, and the CPU have a name."""
    leave_unpinned(shims)
    for home in _HOMES:
        with contextlib.suppress(ModuleNotFoundError):
            tuning: Any = importlib.import_module(f"{home}.lora_tuning_config")
            tuning.get_device_name = lambda: "cpu"  # there is no file of block sizes for it, as for most GPUs
            shims.append("lora_tuning_config.get_device_name: cpu")


def leave_unpinned(shims: list[str]) -> None:
    """Once in a process: a CPU has no memory to pin."""
    import torch

    shim = f"{', '.join(f'torch.{name}' for name in _FACTORIES)}, Tensor.pin_memory: no pinned memory"
    if shim in shims:
        return
    for name in _FACTORIES:
        setattr(torch, name, _without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    shims.append(shim)


def _without_pinning(original: Any) -> Any:
    def make(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:  # noqa: ARG001
        return hand_on(original, *args, **kwargs)

    return make


# The attention backend of the layers of a multi-layer draft, where the worker names FlashAttention itself.
#
# Up to 0.5.10.post1 `MultiLayerEagleDraftWorker` makes a FlashAttentionBackend for each layer, whatever backend was asked
# for. Its kernels are a GPU's, so its name stands for the release's Triton backend here, which is asked for everywhere else.
# Listed among the shims.


def use_triton(shims: list[str]) -> None:
    """Before the worker is built."""
    from sglang.srt.speculative.multi_layer_eagle_worker_v2 import MultiLayerEagleDraftWorker

    name = "FlashAttentionBackend"
    if name not in MultiLayerEagleDraftWorker.init_attention_backend.__code__.co_names:
        return
    from sglang.srt.layers.attention import flashattention_backend
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    def triton(model_runner: Any, skip_prefill: bool, **_: Any) -> Any:
        return TritonAttnBackend(model_runner, skip_prefill=skip_prefill)

    setattr(flashattention_backend, name, triton)
    shims.append(f"{flashattention_backend.__name__}.{name} = TritonAttnBackend, for the layers of a multi-layer draft")


# FlashAttention's backend on a CPU: its metadata is SGLang's own code, and torch stands in for its kernels.

_FLASH = "sglang.srt.layers.attention.flashattention_backend"
_LATENT_STORE = "sglang.kernels.ops.kvcache.mla_buffer"
_IN_TRITON = Edit(
    target=f"{_LATENT_STORE}._set_mla_kv_buffer_impl",
    match="if not current_platform.capabilities.supports_triton:",
    replacement="if False:",
)


def use_flash_attention(shims: list[str]) -> None:
    """Before a scheduler is built. Raises NotDriven for a release that cannot import it here."""
    packages: dict[str, Any] = {name: importlib.import_module(name) for name in ("sgl_kernel", "sgl_kernel.flash_attn")}
    backend: Any = importlib.import_module(_FLASH)
    common: Any = importlib.import_module("sglang.srt.utils.common")
    registry: Any = importlib.import_module("sglang.srt.layers.attention.attention_registry")
    for name in ("flash_attn_with_kvcache", "flash_attn_varlen_func", "merge_state_v2", "get_scheduler_metadata"):
        stand_in = tape.opaque(getattr(flash_attention, name))
        for module in (*packages.values(), backend):
            setattr(module, name, stand_in)
    for module in (common, registry, backend):
        module.get_device_capability = lambda *_, **__: (9, 0)
    store_latent_rows_by_triton(shims)
    shims += [
        "sgl_kernel's FlashAttention 3 and merge_state_v2: flash_attention.py, from its semantics",
        "get_device_capability: 9.0, a Hopper GPU's, for FlashAttention's backend",
    ]


def store_latent_rows_by_triton(shims: list[str]) -> None:
    """Torch's store waits for the device, which no graph may."""
    with contextlib.suppress(ModuleNotFoundError, patches.PatchFailed):  # an older release has the kernel alone
        store: Any = importlib.import_module(_LATENT_STORE)
        patches.rewrite(_IN_TRITON)
        store.is_arch_support_pdl = lambda: False
        shims.append(f"{_LATENT_STORE}: the Triton kernel that stores latent rows, and not torch")


# SGLang's rotary embeddings of latent attention on a CPU: it makes those of a lengthened context there, and no others.
#
# Without a scaling `get_rope_cpu` ends in an assertion. What SGLang makes on every other device then serves a CPU too, in plain
# torch. Called by boot.py for recipes with latent rows. Seen on 0.5.9, where rotary embeddings are one module, 0.5.12.post1,
# 0.5.17, 0.5.22 and 0.5.23.

_MODULES = ("sglang.srt.layers.rotary_embedding.factory", "sglang.srt.layers.rotary_embedding")


def allow(shims: list[str]) -> None:
    """Before a model is built."""
    module: Any = next(filter(None, map(_with_both, _MODULES)))
    of_cpu, of_others = module.get_rope_cpu, module.get_rope
    if hasattr(of_cpu, "eagletwin"):
        return

    def get_rope(
        head_size: int,
        rotary_dim: int,
        max_position: int,
        base: int,
        is_neox_style: bool = True,
        rope_scaling: dict[str, Any] | None = None,
        *more: Any,
        **named: Any,
    ) -> Any:
        known = (head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling)
        return of_others(*known) if rope_scaling is None else of_cpu(*known, *more, **named)

    get_rope.eagletwin = True  # type: ignore[attr-defined]
    module.get_rope_cpu = get_rope
    shims.append("get_rope_cpu: without a scaling, what get_rope makes on other devices")


def _with_both(name: str) -> Any:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError:
        return None
    return module if hasattr(module, "get_rope_cpu") else None


# What the forward of a layer of a multi-layer draft reads and writes with: where attention looks for it.
#
# Up to 0.5.12.post1 a forward takes attention backend and pools from fields of the batch alone. From 0.5.13 on it takes the
# backend from its context, and the pools from the backend; the fields of the batch are not read.


def forward_memory(*arguments: Any) -> dict[str, Any]:
    """By the name that it has on a model runner. arguments: those of the model's forward, the batch among them."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    names = ("attn_backend", "token_to_kv_pool", "req_to_token_pool")
    if {field.name for field in dataclasses.fields(ForwardBatch)}.issuperset(names):
        [batch] = [argument for argument in arguments if isinstance(argument, ForwardBatch)]
        return {name: getattr(batch, name) for name in names}
    from sglang.srt.model_executor.forward_context import get_attn_backend

    backend = get_attn_backend()
    return {"attn_backend": backend} | {name: getattr(backend, name) for name in names[1:]}
