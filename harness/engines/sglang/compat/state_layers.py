"""SGLang's layers that keep a state on a CPU: they take sgl_kernel's C++ ops there, and Triton kernels everywhere else.

`is_cpu()` decides, in part while the modules are imported and in part while they run. The commit's kernels refuse tensors that
are not a GPU's, or are passed over for them. What one kind of layer needs besides is in delta_layers.py and scan_layers.py.
Called by boot.py for recipes with such layers. Seen on 0.5.13 to 0.5.23; 0.5.13 has no windows that overlap, and no commit of
such.
"""

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from typing import Any

from eagletwin.harness.core.patch import Edit

from .. import patches
from ..blame import NotDriven
from ..own_loader import import_early
from . import cuda_literals, delta_layers, scan_layers

# The first keeps what a convolution of a chain's nodes saw as windows that overlap, as on a GPU. The others are imported for
# layers of any kind.
_MODULES = (
    "sglang.srt.mem_cache.memory_pool",
    delta_layers.KERNELS,
    "sglang.srt.layers.attention.linear.gdn_backend",
)
_SCATTER = "mamba_state_scatter_triton"
_COMMITS = (
    f"sglang.kernels.ops.mamba.{_SCATTER}",
    f"sglang.srt.layers.attention.mamba.{_SCATTER}",
)  # the latter up to 0.5.15.post1
_REFUSES = ("if not (dst.is_cuda or dst.is_xpu) or", "if")
# Of each gate the functions that have it in one release or another, and what is changed there. The first that is there counts.
_STATES, _WINDOWS = (
    tuple((f"{commit}.{function}", *change) for commit in _COMMITS for change in (_REFUSES, older))
    for function, older in (
        ("fused_mamba_state_scatter_with_mask", ("if not dst.is_cuda or not src.is_cuda:", "if False:")),
        ("fused_conv_window_scatter_with_mask", ("if not (dst.is_cuda and src.is_cuda and ", "if not (")),
    )
)
_PLATFORMS = "is_cuda() or is_musa()"
_WITH_CACHE = (
    ("sglang.srt.arg_groups.mamba_hook._platform_supports_mamba_cache_extra_buffer", "platform.is_cuda", "True"),
    ("sglang.srt.arg_groups.mamba_hook.validate_mamba_extra_buffer", "get_platform().is_cuda", "True"),
    ("sglang.srt.server_args.ServerArgs._validate_mamba_extra_buffer", _PLATFORMS, "True"),
    ("sglang.srt.server_args.ServerArgs._handle_mamba_radix_cache", _PLATFORMS, "True"),
)
# Up to 0.5.18 torch works out the commit's node on every device.
_COMMITTED = (("sglang.srt.speculative.spec_utils._verify_commit_step_indices", "if accept_index.is_cuda:", "if True:"),)

# Memory that torch cannot pin without a GPU: up to 0.5.22, where a round is told the slots in which it tracks states.
_PINNED = ("sglang.srt.managers.schedule_batch.set_mamba_track_indices_from_reqs", "pin_memory=True,", "")


def _no() -> bool:
    return False


@contextlib.contextmanager
def _not_on_cpu() -> Iterator[None]:
    """Modules that are imported meanwhile are told that they are not on a CPU."""
    from sglang.srt import utils

    places: list[Any] = [utils, utils.common]
    on_cpu = [place.is_cpu for place in places]
    for place in places:
        place.is_cpu = _no
    try:
        yield
    finally:
        for place, original in zip(places, on_cpu, strict=True):
            place.is_cpu = original


def import_models(models: Sequence[str], shims: list[str]) -> None:
    """Import these modules before a patch does, which may name functions of theirs: on a CPU some are no module at all. What
    is not there is for `use_triton` to say."""
    with _not_on_cpu():
        import_early(models, shims)


def use_triton(shims: list[str], models: Sequence[str], *, scans: bool) -> None:
    """Before a model of these modules is built, whose layers scan (Mamba-2) or follow the gated delta rule. Raises NotDriven on
    a release that has these layers elsewhere."""
    kind: Any = scan_layers if scans else delta_layers
    try:
        with _not_on_cpu():
            for name in (*_MODULES, *kind.MODULES, *models):
                _as_elsewhere(importlib.import_module(name))
                shims.append(f"{name}: is_cpu() is False")
        for gate in (_STATES, *((one,) for one in kind.GATES)):
            shims.append(f"{_opened(gate)}: for tensors on a CPU too")
        for gate in (_WINDOWS, _WITH_CACHE, _COMMITTED):
            with contextlib.suppress(patches.PatchFailed):  # a gate that stays shut raises, or is told by the kernels that ran
                shims.append(f"{_opened(gate)}: for tensors on a CPU too")
    except (ModuleNotFoundError, patches.PatchFailed) as error:
        raise _elsewhere(error) from error
    with contextlib.suppress(patches.PatchFailed):  # the memory is another one, or a crash tells
        shims.append(f"{_opened((_PINNED,))}: no pinned memory")
    cuda_literals.install_for_states(shims)
    try:
        kind.complete(shims)
    except ModuleNotFoundError as error:
        raise _elsewhere(error) from error


def _elsewhere(error: Exception) -> NotDriven:
    return NotDriven(f"layers that keep a state: this release has not what 0.5.23 has ({error})")


def strategy_argument() -> str:
    """What ServerArgs calls how states are tracked for the prefix cache: 0.5.14 renamed it."""
    from sglang.srt.server_args import ServerArgs

    names = ("mamba_radix_cache_strategy", "mamba_scheduler_strategy")
    return next(name for name in names if hasattr(ServerArgs, name))


def _opened(gate: Sequence[tuple[str, str, str]]) -> str:
    """The first function of these that has the gate, which is open now. Raises PatchFailed with what the first lacks."""
    first: Exception | None = None
    for function, match, replacement in gate:
        try:
            patches.rewrite(Edit(target=function, match=match, replacement=replacement))
        except (ModuleNotFoundError, patches.PatchFailed) as error:
            first = first or error
        else:
            return function
    raise patches.PatchFailed(str(first))


def _as_elsewhere(module: Any) -> None:
    """What a module that was imported before has kept of the answer."""
    if hasattr(module, "_is_cpu"):
        module._is_cpu = False
    if hasattr(module, "is_cpu"):
        module.is_cpu = _no
