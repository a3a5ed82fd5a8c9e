"""SGLang's layers that keep a state on a CPU: they take sgl_kernel's C++ ops there, and Triton kernels everywhere else.

`is_cpu()` decides, in part while the modules are imported and in part while they run. The commit's kernels refuse tensors that
are not a GPU's, or are passed over for them. Called by boot.py for recipes with such layers. Seen on 0.5.13 to 0.5.23; 0.5.13
has no windows that overlap, and no commit of such.
"""

import contextlib
import importlib
import inspect
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from eagletwin.harness.core.patch import Edit
from eagletwin.harness.engines.inside import changes, patches
from eagletwin.harness.engines.inside.blame import NotDriven, hand_on
from eagletwin.harness.engines.inside.own_loader import import_early

from ..stand_ins import sgl_kernel

# SGLang up to 0.5.15.post1 writes device="cuda" where it means the device of the batch, and up to 0.5.18 that of states.
#
# Seen in the draft loop of the multi-layer worker and in EagleVerifyInput.create_idle_input, 0.5.9 to 0.5.15.post1; and in
# MambaPool, 0.5.13 to 0.5.18.

_WRITE_CUDA = ("sglang.srt.speculative.eagle_info", "sglang.srt.speculative.multi_layer_eagle_worker_v2")
_WRITE_CUDA_FOR_STATES = ("sglang.srt.mem_cache.memory_pool",)


def name_the_cpu(shims: list[str]) -> None:
    """Let torch.get_device_module() be the CPU's with a torch for CUDA, which names a GPU although none may be used. Before
    SGLang is imported."""
    if torch.version.cuda is not None:
        asked = torch.get_device_module
        torch.get_device_module = lambda device=None: torch.cpu if device is None else asked(device)  # type: ignore[assignment]
        shims.append("torch.get_device_module: the CPU's where none is named")


def let_cuda_be_the_cpu(shims: list[str]) -> None:
    """Let torch.full and torch.empty make on the CPU what is asked for on "cuda", where this SGLang asks for it."""
    _replace(("full", "empty"), _WRITE_CUDA, shims)


def let_cuda_be_the_cpu_for_states(shims: list[str]) -> None:
    """The same of torch.zeros, which the pool of states asks."""
    _replace(("zeros",), _WRITE_CUDA_FOR_STATES, shims)


def _replace(functions: Sequence[str], modules: Sequence[str], shims: list[str]) -> None:
    if torch.cuda.is_available():
        return
    there = [sys.modules[name] for name in modules if name in sys.modules]
    if not changes.decide(lambda: any('device="cuda"' in inspect.getsource(module) for module in there)):
        return
    for name in functions:
        original = getattr(torch, name)

        def on_the_host(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
            if kwargs.get("device") == "cuda":
                kwargs["device"] = "cpu"
            return hand_on(_original, *args, **kwargs)

        setattr(torch, name, on_the_host)
    shims.append(f'{", ".join(f"torch.{name}" for name in functions)}: device="cuda" is the CPU')


# The gated delta rule of SGLang's Qwen3-Next and Qwen3.5. Prefill alone is replaced: stand_ins/sgl_kernel.py says why. Seen on
# 0.5.13 to 0.5.23.

KERNELS = "sglang.srt.layers.attention.linear.kernels.gdn_triton"
# In which is_cpu() must be False
_DELTA_MODULES = (
    "sglang.srt.configs.qwen3_next",
    "sglang.srt.models.qwen2_moe",
)
# Of Qwen3.5, whose heads it norms: it asks a GPU how many processors it has, and shares the rows out among them
_NORM = "sglang.kernels.ops.attention.fla.layernorm_gated"


def _complete_delta(shims: list[str]) -> None:
    kernels: Any = sys.modules[KERNELS]
    kernels.chunk_gated_delta_rule = sgl_kernel.chunk_gated_delta_rule
    with contextlib.suppress(ModuleNotFoundError):  # up to 0.5.15.post1 it lies elsewhere, and Qwen3-Next has another norm
        norm: Any = importlib.import_module(_NORM)
        norm._get_sm_count = lambda device: 1
        shims.append(f"{_NORM}: one processor, so that a block has several rows")
    shims.append("gdn_triton.chunk_gated_delta_rule (prefill alone): sgl_kernel.py, the recurrence in torch")


# The Mamba-2 layers of SGLang's Nemotron-H, and its experts, whose kernels are a GPU's.
#
# All kernels of these layers run, prefill's chunks among them. A GPU chooses the tiles of some by the clock; here they are the
# smallest, so that there are several. Of the experts, torch's own code for a CPU knows neither their activation nor the type
# of the router's product. Seen on 0.5.23.

_MIXER = "sglang.srt.layers.attention.mamba.mamba"
_CONVOLUTIONS = "sglang.kernels.ops.mamba.causal_conv1d_triton"
_CHUNKS = "sglang.kernels.ops.mamba.triton_ops"
_TUNED = ("ssd_bmm", "ssd_chunk_scan", "ssd_chunk_state", "ssd_state_passing")
# In which is_cpu() must be False
_SCAN_MODULES = (_MIXER,)
_ACTIVATION = 'elif moe_runner_config.activation == "gelu":'
_SCAN_GATES = (
    (
        "sglang.srt.layers.moe.fused_moe_native.moe_forward_native",
        _ACTIVATION,
        f'elif moe_runner_config.activation == "relu2":\n    act = lambda x: x.relu().square()\n{_ACTIVATION}',
    ),
    (
        "sglang.srt.models.nemotron_h.NemotronHMoE._forward_core_normal",
        "hidden_states, self.gate.weight.t(), out_dtype=torch.float32",
        "hidden_states, self.gate.weight.t()",
    ),
)


def _complete_scans(shims: list[str]) -> None:
    mixer: Any = importlib.import_module(_MIXER)
    convolutions = importlib.import_module(_CONVOLUTIONS)
    for name in ("causal_conv1d_fn", "causal_conv1d_update"):
        for bound in (name, f"{name}_triton"):
            setattr(mixer, bound, getattr(convolutions, name))
            shims.append(f"{_MIXER}.{bound}: the Triton kernel, as on a GPU")
    torch.cpu.device = lambda index: contextlib.nullcontext()  # type: ignore[attr-defined]
    shims.append("torch.cpu.device: there is one")
    for name in _TUNED:
        for kernel in vars(importlib.import_module(f"{_CHUNKS}.{name}")).values():
            if hasattr(kernel, "configs"):
                kernel.configs = [min(kernel.configs, key=lambda config: math.prod(config.kwargs.values()))]
        shims.append(f"{_CHUNKS}.{name}: tuned kernels take their smallest tile")


# The gates of either kind.

# The first keeps what a convolution of a chain's nodes saw as windows that overlap, as on a GPU. The others are imported for
# layers of any kind.
_MODULES = (
    "sglang.srt.mem_cache.memory_pool",
    KERNELS,
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
    kind = (_SCAN_MODULES, _SCAN_GATES, _complete_scans)
    modules, gates, complete = kind if scans else (_DELTA_MODULES, (), _complete_delta)
    try:
        with _not_on_cpu():
            for name in (*_MODULES, *modules, *models):
                _as_elsewhere(importlib.import_module(name))
                shims.append(f"{name}: is_cpu() is False")
        for gate in (_STATES, *((one,) for one in gates)):
            shims.append(f"{_open_gate(gate)}: for tensors on a CPU too")
        for gate in (_WINDOWS, _WITH_CACHE, _COMMITTED):
            with contextlib.suppress(patches.PatchFailed):  # a gate that stays shut raises, or is told by the kernels that ran
                shims.append(f"{_open_gate(gate)}: for tensors on a CPU too")
    except (ModuleNotFoundError, patches.PatchFailed) as error:
        raise _elsewhere(error) from error
    with contextlib.suppress(patches.PatchFailed):  # the memory is another one, or a crash tells
        shims.append(f"{_open_gate((_PINNED,))}: no pinned memory")
    let_cuda_be_the_cpu_for_states(shims)
    try:
        complete(shims)
    except ModuleNotFoundError as error:
        raise _elsewhere(error) from error


def _elsewhere(error: Exception) -> NotDriven:
    return NotDriven(f"layers that keep a state: this release has not what 0.5.23 has ({error})")


def strategy_argument() -> str:
    """What ServerArgs calls how states are tracked for the prefix cache: 0.5.14 renamed it."""
    from sglang.srt.server_args import ServerArgs

    names = ("mamba_radix_cache_strategy", "mamba_scheduler_strategy")
    return next(name for name in names if hasattr(ServerArgs, name))


def _open_gate(gate: Sequence[tuple[str, str, str]]) -> str:
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
