"""Which runtime executes SGLang's Triton kernels, and what it found. Called by zygote.py and runner.py.

The fast runtime (engines/triton_cpu) executes each kernel's own source and checks every memory access. Triton's interpreter is
what it is proven against: `shadow` runs both and compares.
"""

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from eagletwin.harness.core.run_spec import Kernels, Mode
from eagletwin.harness.engines import triton_cpu
from eagletwin.harness.engines.inside import changes
from eagletwin.harness.engines.inside.blame import hand_on
from eagletwin.harness.engines.inside.violations import CHECKS, RULES
from eagletwin.harness.engines.protocol import Build

from .compat import kernel_modules
from .graphs import streams
from .stand_ins import flash_attention
from .taps.pools import buffers
from .taps.speculation import draft_runners

# A guard behind the lists of KV slots that draft decode works with, where the kernels' stores are not checked.
#
# The fast runtime sees each store outside a tensor. Compiled kernels, and Triton's interpreter, store at any address. So what
# the draft's attention backend allocates for its lists is made a little longer than it asks for, and what lies behind is looked
# at whenever the lists have been made. A store further away than that, between two rows of one buffer, or of another kernel
# into another buffer, is not seen.

_LENGTH = 256  # elements: more than a batch of 8 with trees of 8 branches and 4 steps can be too long by
_MARK = 0x7EA9  # neither a slot of a case's pool nor a number of tokens: what may be stored there by mistake
_BACKEND = ("sglang.srt.layers.attention.triton_backend", "TritonMultiStepDraftBackend")

found: list[triton_cpu.KernelViolation] = []  # of this case
_kept: list[tuple[Tensor, str]] = []  # guards of buffers that live as long as the engine: those of graphs


def install(shims: list[str]) -> None:
    """Before a scheduler is built."""
    backend: Any = getattr(importlib.import_module(_BACKEND[0]), _BACKEND[1])
    backend.init_forward_metadata = _made_anew(backend.init_forward_metadata)
    backend.init_cuda_graph_state = _made_once(backend.init_cuda_graph_state)
    backend.common_template = _check_after(backend.common_template)
    shims.append(f"{_BACKEND[1]}: a guard lies behind each buffer that it allocates")


class _Longer(TorchFunctionMode):
    """Gives each tensor of slots or of numbers of them that is allocated a guard behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.guards: list[tuple[Tensor, str]] = []

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = hand_on(function, *args, **(kwargs or {}))
        if function not in (torch.empty, torch.zeros) or made.dtype not in (torch.int32, torch.int64):
            return made
        longer = made.new_full((made.numel() + _LENGTH,), _MARK)
        longer[: made.numel()] = made.flatten()
        self.guards.append((longer[made.numel() :], f"an {str(made.dtype)[6:]} tensor of shape {tuple(made.shape)}"))
        return longer[: made.numel()].view(made.shape)


def _made_anew(call: Callable[..., Any]) -> Callable[..., Any]:
    """Buffers of one forward."""

    def around(*args: Any, **kwargs: Any) -> Any:
        with _Longer() as longer:
            result = hand_on(call, *args, **kwargs)
        _look(longer.guards)
        return result

    return around


def _made_once(call: Callable[..., Any]) -> Callable[..., Any]:
    """Buffers of graphs."""

    def around(*args: Any, **kwargs: Any) -> Any:
        with _Longer() as longer:
            result = hand_on(call, *args, **kwargs)
        _kept.extend(longer.guards)
        return result

    return around


def _check_after(call: Callable[..., Any]) -> Callable[..., Any]:
    """The lists are made, for a graph too: before it is replayed."""

    def around(*args: Any, **kwargs: Any) -> Any:
        result = hand_on(call, *args, **kwargs)
        if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            _look(_kept)
        return result

    return around


def _look(guards: list[tuple[Tensor, str]]) -> None:
    """Raises OutOfBounds if something was stored in a guard. The guard is then restored for the next case."""
    for guard, name in guards:
        stored = (guard != _MARK).nonzero().flatten().tolist()
        if stored:
            guard.fill_(_MARK)
            detail = f"{len(stored)} stores behind the end of {name}, the last {stored[-1] + 1} elements behind it"
            found.append(triton_cpu.OutOfBounds(detail, kernel="draft decode's KV indices"))
            raise found[-1]


RULES.append((streams.Race, "race.order"))


_UNDEFINED = contextlib.ExitStack()  # held for as long as this process lives


def precompile() -> None:
    """Compile the kernels that cases launch, so that forked children need not. Call it when module flags are set."""
    changes.watch_kernels()
    triton_cpu.precompile(kernel_modules.launched_modules())


def precompile_for_states() -> None:
    """The same for models whose layers keep a state: their kernels take 0.1 s, which the first case of each process would."""
    triton_cpu.precompile(kernel_modules.launched_modules(states=True))


def prepare(kernels: Kernels, mode: Mode, shims: list[str]) -> None:
    """Before a scheduler is built: with `checked`, what torch.empty returns from now on is undefined, and says so. Where the
    kernels' stores are not checked, a guard lies behind the buffers that may be too short."""
    if kernels == "checked":
        _UNDEFINED.enter_context(triton_cpu.poison_empty())
    compiled = mode.device == "cuda" and mode.attention == "triton"  # another backend has no such lists
    if kernels == "interpreter" or compiled:
        install(shims)
    changes.watch_launches(fast=mode.device == "cpu" and kernels != "interpreter")


def building(kernels: Kernels, mode: Mode) -> contextlib.AbstractContextManager[None]:
    """While a scheduler is built: what its pools launch to warm up, before it is known what raw addresses may reach."""
    if kernels == "interpreter" or mode.device == "cuda":
        return contextlib.nullcontext()
    return triton_cpu.installation()


def start(build: Build, scheduler: Any) -> None:
    """What a worker's process begins with."""
    run(build.kernels, build.mode, scheduler)
    if build.configuration.engine.sglang.cuda_branches and build.kernels != "interpreter" and build.mode.device == "cpu":
        streams.watch_launches()


def run(kernels: Kernels, mode: Mode, scheduler: Any) -> None:
    """Run this process's kernels as asked from now on. Raw addresses may reach the KV pools, and prefixes.

    On a GPU they are compiled, and the fast runtime is not there."""
    if kernels == "interpreter" or mode.device == "cuda":
        return
    pools = triton_cpu.LivePools()
    workers = {"target": scheduler.tp_worker.model_runner}
    workers |= {f"draft layer {n}": runner for n, runner in enumerate(draft_runners(scheduler))}
    for name, runner in workers.items():
        for number, layer in enumerate(buffers(runner.token_to_kv_pool)):
            for part, rows in layer.parts.items():
                pools.register(f"{name} {part} of layer {number}", rows)
    kernel_modules.register_in(pools)
    triton_cpu.install(CHECKS[kernels], pools)


def clear() -> None:
    """Forget what the kernels of the last case did."""
    triton_cpu.clear()
    found.clear()
    flash_attention.faults.clear()
    streams.races.clear()


def faults() -> tuple[triton_cpu.KernelViolation, ...]:
    """What kernels did in this case that they must not, even if SGLang swallowed the exception."""
    return (*triton_cpu.faults(), *found, *flash_attention.faults, *streams.races)
