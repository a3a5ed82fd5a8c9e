"""Where the Triton kernels live that cases launch, and pools as they are made. Each generation of SGLang has moved them.

SGLang imports four times as many modules with kernels; what is not named here is compiled when it is launched, in each
process anew. Seen on 0.5.13, 0.5.15, 0.5.16 and 0.5.23.
"""

import contextlib
import importlib
import inspect
import sys
from types import ModuleType
from typing import Any

from eagletwin.harness.engines.triton_cpu import LivePools

from ..blame import hand_on

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


def launched(*, states: bool = False) -> list[ModuleType]:
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
