"""SGLang's layers that keep a state on a CPU: they take sgl_kernel's C++ ops there, and Triton kernels everywhere else.

`is_cpu()` decides, in part while the modules are imported and in part while they run. The commit's kernels refuse tensors that
are not a GPU's, or are passed over for them. What one kind of layer needs besides is in delta_layers.py and scan_layers.py.
Called by boot.py for recipes with such layers. Seen on 0.5.23.
"""

import importlib
from typing import Any

from eagletwin.harness.core.patch import Edit
from eagletwin.reference.sizes import LlamaShape

from .. import patches
from ..not_driven import NotDriven
from . import delta_layers, scan_layers

# The first keeps what a convolution of a chain's nodes saw as windows that overlap, as on a GPU. The backends of all kinds import
# those of the delta rule.
_MODULES = (
    "sglang.srt.mem_cache.memory_pool",
    delta_layers.KERNELS,
    "sglang.srt.layers.attention.linear.gdn_backend",
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


def use_triton(target: LlamaShape, shims: list[str]) -> None:
    """Before a model is built. Raises NotDriven on a release that has these layers elsewhere."""
    from sglang.srt import utils

    module, name, field = _HELD
    held = getattr(importlib.import_module(module), name, None)
    if field not in getattr(held, "__dataclass_fields__", {}):
        raise NotDriven(f"layers that keep a state: this release has not what 0.5.23 has ({name}.{field})")
    kind: Any = scan_layers if target.scan is not None else delta_layers
    places: list[Any] = [utils, utils.common]
    on_cpu = [place.is_cpu for place in places]
    for place in places:
        place.is_cpu = _no
    try:
        for name in (*_MODULES, *kind.MODULES):
            _as_elsewhere(importlib.import_module(name))
            shims.append(f"{name}: is_cpu() is False")
        for function, match, replacement in (*_GATES, *kind.GATES):
            patches.rewrite(Edit(target=function, match=match, replacement=replacement))
            shims.append(f"{function}: for tensors on a CPU too")
    except (ModuleNotFoundError, patches.PatchFailed) as error:
        raise NotDriven(f"layers that keep a state: this release has not what 0.5.23 has ({error})") from error
    finally:
        for place, original in zip(places, on_cpu, strict=True):
            place.is_cpu = original
    kind.complete(shims)


def _as_elsewhere(module: Any) -> None:
    """What a module that was imported before has kept of the answer."""
    if hasattr(module, "_is_cpu"):
        module._is_cpu = False
    if hasattr(module, "is_cpu"):
        module.is_cpu = _no
