"""Which runtime executes SGLang's Triton kernels, and what it found. Called by zygote.py and runner.py.

The fast runtime (engines/triton_cpu) executes each kernel's own source and checks every memory access. Triton's interpreter is
what it is proven against: `shadow` runs both and compares.
"""

import contextlib
from typing import Any

from eagletwin.harness.core.records import Ending
from eagletwin.harness.core.run_spec import Kernels
from eagletwin.harness.engines import triton_cpu
from eagletwin.harness.engines.wire import Build, Serve

from . import changes, guards
from .eras import kernel_modules, prefix_pointers
from .taps.pools import buffers
from .taps.speculation import draft_runners

CHECKS: dict[Kernels, triton_cpu.Checks] = {
    "fast": triton_cpu.Checks(),
    "shadow": triton_cpu.Checks(shadow=True),
    "checked": triton_cpu.Checks(poison=True, races=True, order=0),
}

# Violation -> the rule that it breaks. Subclasses first.
_RULES: tuple[tuple[type[triton_cpu.KernelViolation], str], ...] = (
    (triton_cpu.OutOfBounds, "kernel.memory"),
    (triton_cpu.PoisonLeak, "kernel.undefined"),
    (triton_cpu.OrderDependence, "kernel.order"),
    (triton_cpu.ShadowMismatch, "kernel.shadow"),
)


_UNDEFINED = contextlib.ExitStack()  # held for as long as this process lives


def precompile() -> None:
    """Compile the kernels that cases launch, so that forked children need not. Call it when module flags are set."""
    changes.watch_kernels()
    triton_cpu.precompile(kernel_modules.launched())


def precompile_for_states() -> None:
    """The same for models whose layers keep a state: their kernels take 0.1 s, which the first case of each process would."""
    triton_cpu.precompile(kernel_modules.launched(states=True))


def prepare(build: Build | Serve, shims: list[str]) -> None:
    """Before a scheduler is built: with `checked`, what torch.empty returns from now on is undefined, and says so. Where the
    kernels' stores are not checked, a guard lies behind the buffers that may be too short."""
    if build.kernels == "checked":
        _UNDEFINED.enter_context(triton_cpu.poison_empty())
    compiled = build.mode.device == "cuda" and build.mode.attention == "triton"  # another backend has no such lists
    if build.kernels == "interpreter" or compiled:
        guards.install(shims)
    changes.watch_launches(fast=build.mode.device == "cpu" and build.kernels != "interpreter")


def building(build: Build | Serve) -> contextlib.AbstractContextManager[None]:
    """While a scheduler is built: what its pools launch to warm up, before it is known what raw addresses may reach."""
    if build.kernels == "interpreter" or build.mode.device == "cuda":
        return contextlib.nullcontext()
    return triton_cpu.installed()


def start(build: Build | Serve, scheduler: Any) -> None:
    """Run this process's kernels as asked from now on. Raw addresses may reach the KV pools, and prefixes.

    On a GPU they are compiled, and the fast runtime is not there."""
    if build.kernels == "interpreter" or build.mode.device == "cuda":
        return
    pools = triton_cpu.LivePools()
    workers = {"target": scheduler.tp_worker.model_runner}
    workers |= {f"draft layer {n}": runner for n, runner in enumerate(draft_runners(scheduler))}
    for name, runner in workers.items():
        for number, layer in enumerate(buffers(runner.token_to_kv_pool)):
            for part, rows in layer.parts.items():
                pools.register(f"{name} {part} of layer {number}", rows)
    prefix_pointers.register_in(pools)
    triton_cpu.install(CHECKS[build.kernels], pools)


def clear() -> None:
    """Forget what the kernels of the last case did."""
    triton_cpu.clear()
    guards.found.clear()


def violated(where: str) -> Ending | None:
    """How the case ended if a kernel did what it must not, even if SGLang swallowed the exception."""
    faults = (*triton_cpu.faults(), *guards.found)
    if not faults:
        return None
    rule = next(rule for kind, rule in _RULES if isinstance(faults[0], kind))
    return Ending(kind="faulted", detail=str(faults[0]), where=where, rule=rule, origin=faults[0].kernel)


def fallbacks() -> tuple[str, ...]:
    """Kernels that ran in Triton's interpreter, unchecked, although the fast runtime was asked for."""
    return tuple(f"{name}: {reason}" for name, reason in sorted(triton_cpu.fallbacks().items()))
