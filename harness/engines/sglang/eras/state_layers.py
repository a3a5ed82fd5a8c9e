"""SGLang's layers with a recurrent state on a CPU: they take sgl_kernel's C++ ops there, and Triton kernels everywhere else.

Which it is, is decided while the modules are imported, and in part while they run, by `is_cpu()`.
"""

import importlib
import sys
from typing import Any

from eagletwin.harness.core.patch import Edit

from .. import patches
from ..stand_ins import delta_rule

_MODULES = (
    "sglang.srt.mem_cache.memory_pool",
    "sglang.srt.configs.qwen3_next",
    "sglang.srt.layers.attention.linear.kernels.gdn_triton",
    "sglang.srt.layers.attention.linear.gdn_backend",
    "sglang.srt.models.qwen2_moe",
    "sglang.srt.models.qwen3_next",
    "sglang.srt.models.qwen3_next_mtp",
)


def _no() -> bool:
    return False


def use_triton(shims: list[str]) -> None:
    """Before a model is built: import these modules as on a device that is no CPU."""
    from sglang.srt import utils

    places = [utils, utils.common]
    found = [place.is_cpu for place in places]
    for place in places:
        place.is_cpu = _no
    try:
        for name in _MODULES:
            module: Any = sys.modules.get(name)
            if module is None:
                module = importlib.import_module(name)
            if hasattr(module, "_is_cpu"):
                module._is_cpu = False
            if hasattr(module, "is_cpu"):
                module.is_cpu = _no
            shims.append(f"{name}: imported with is_cpu() = False")
        kernels: Any = sys.modules["sglang.srt.layers.attention.linear.kernels.gdn_triton"]
        kernels.chunk_gated_delta_rule = delta_rule.chunk_gated_delta_rule
        shims.append("chunk_gated_delta_rule (prefill): the recurrence in torch, in place of kernels with block pointers")
        _open_gates(shims)
    finally:
        for place, original in zip(places, found, strict=True):
            place.is_cpu = original


_COMMIT = "sglang.kernels.ops.mamba.mamba_state_scatter_triton"
_GATES = (
    (f"{_COMMIT}.fused_mamba_state_scatter_with_mask", "if not (dst.is_cuda or dst.is_xpu) or", "if"),
    (f"{_COMMIT}.fused_conv_window_scatter_with_mask", "if not (dst.is_cuda or dst.is_xpu) or", "if"),
    ("sglang.srt.speculative.spec_utils._verify_commit_step_indices", "if accept_index.is_cuda:", "if True:"),
)


def _open_gates(shims: list[str]) -> None:
    """The Triton kernels of the commit refuse other tensors than a GPU's, or are passed over for them."""
    for target, match, replacement in _GATES:
        patches.rewrite(Edit(target=target, match=match, replacement=replacement))
        shims.append(f"{target}: tensors on a CPU too")
