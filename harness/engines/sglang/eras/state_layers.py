"""SGLang's layers that keep a state on a CPU: they take sgl_kernel's C++ ops there, and Triton kernels everywhere else.

`is_cpu()` decides, in part while the modules are imported and in part while they run. The commit's kernels refuse tensors that
are not a GPU's, or are passed over for them. Prefill alone is replaced: stand_ins/delta_rule.py says why. Called by boot.py for
recipes with such layers. Seen on 0.5.23.
"""

import importlib
import sys
from typing import Any

from eagletwin.harness.core.patch import Edit

from .. import patches
from ..not_driven import NotDriven
from ..stand_ins import delta_rule

# The first keeps what a convolution of a chain's nodes saw as windows that overlap, as on a GPU.
_MODULES = (
    "sglang.srt.mem_cache.memory_pool",
    "sglang.srt.configs.qwen3_next",
    "sglang.srt.layers.attention.linear.kernels.gdn_triton",
    "sglang.srt.layers.attention.linear.gdn_backend",
    "sglang.srt.models.qwen2_moe",
    "sglang.srt.models.qwen3_next",
    "sglang.srt.models.qwen3_next_mtp",
)
# What a request holds of tracked states: taps/states.py reads which of its slots are empty.
_HELD = ("sglang.srt.managers.schedule_batch", "ReqKvInfo", "mamba_ping_pong_empty")
_COMMIT = "sglang.kernels.ops.mamba.mamba_state_scatter_triton"
_GATES = (
    (f"{_COMMIT}.fused_mamba_state_scatter_with_mask", "if not (dst.is_cuda or dst.is_xpu) or", "if"),
    (f"{_COMMIT}.fused_conv_window_scatter_with_mask", "if not (dst.is_cuda or dst.is_xpu) or", "if"),
    ("sglang.srt.arg_groups.mamba_hook._platform_supports_mamba_cache_extra_buffer", "platform.is_cuda", "True"),
    ("sglang.srt.speculative.spec_utils._verify_commit_step_indices", "if accept_index.is_cuda:", "if True:"),
)


def _no() -> bool:
    return False


def use_triton(shims: list[str]) -> None:
    """Before a model is built. Raises NotDriven on a release that has these layers elsewhere."""
    from sglang.srt import utils

    module, name, field = _HELD
    held = getattr(importlib.import_module(module), name, None)
    if field not in getattr(held, "__dataclass_fields__", {}):
        raise NotDriven(f"layers that keep a state: this release has not what 0.5.23 has ({name}.{field})")
    places: list[Any] = [utils, utils.common]
    on_cpu = [place.is_cpu for place in places]
    for place in places:
        place.is_cpu = _no
    try:
        for name in _MODULES:
            _as_elsewhere(importlib.import_module(name))
            shims.append(f"{name}: is_cpu() is False")
        for target, match, replacement in _GATES:
            patches.rewrite(Edit(target=target, match=match, replacement=replacement))
            shims.append(f"{target}: for tensors on a CPU too")
    except (ModuleNotFoundError, patches.PatchFailed) as error:
        raise NotDriven(f"layers that keep a state: this release has not what 0.5.23 has ({error})") from error
    finally:
        for place, original in zip(places, on_cpu, strict=True):
            place.is_cpu = original
    kernels: Any = sys.modules["sglang.srt.layers.attention.linear.kernels.gdn_triton"]
    kernels.chunk_gated_delta_rule = delta_rule.chunk_gated_delta_rule
    shims.append("gdn_triton.chunk_gated_delta_rule (prefill alone): delta_rule.py, the recurrence in torch")


def _as_elsewhere(module: Any) -> None:
    """What a module that was imported before has kept of the answer."""
    if hasattr(module, "_is_cpu"):
        module._is_cpu = False
    if hasattr(module, "is_cpu"):
        module.is_cpu = _no
