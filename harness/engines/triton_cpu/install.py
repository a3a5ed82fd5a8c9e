"""Puts this runtime in the place of `InterpretedFunction.run`, and takes it out again. Every launch then runs here;
what this runtime does not support runs in the stock interpreter and is listed by `fallbacks()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from triton.runtime.interpreter import InterpretedFunction

from .checks import Checks, execute
from .compiler import compile_kernel
from .launch import bind
from .pools import LivePools
from .state import KernelError, KernelViolation, Unshadowed, Unsupported


@dataclass(slots=True)
class _Installed:
    stock: Callable[..., Any]
    launches: int = 0


_installed: _Installed | None = None
_fallbacks: dict[str, str] = {}
_note_fallback: Callable[[str, str], object] | None = None
_faults: list[KernelViolation] = []
_FAULTS_KEPT = 1000  # a faulty kernel launched in a loop must not fill memory


def fallbacks() -> dict[str, str]:
    """{kernel: reason} of the launches so far that ran in the stock interpreter, unchecked, or that it cannot run and so could
    not be compared with; the latest reason of each kernel."""
    return dict(_fallbacks)


def watch_fallbacks(note: Callable[[str, str], object]) -> None:
    """Have the first launch of each kernel that runs in the stock interpreter noted as it comes: (kernel, reason)."""
    global _note_fallback
    _note_fallback = note


def faults() -> list[KernelViolation]:
    """Every fault found so far, raised or recorded, oldest first (the first 1000): a caller may have swallowed the
    exception."""
    return list(_faults)


def launches() -> int:
    """How many launches this installation has seen; 0 when not installed."""
    return _installed.launches if _installed is not None else 0


def clear() -> None:
    """Forget fallbacks and faults (between cases in one process)."""
    _fallbacks.clear()
    _faults.clear()


def _keep(fault: KernelViolation) -> None:
    if len(_faults) < _FAULTS_KEPT:
        _faults.append(fault)


def _fell_back(kernel: str, reason: str) -> None:
    if kernel not in _fallbacks and _note_fallback is not None:
        _note_fallback(kernel, reason)
    _fallbacks[kernel] = reason


def install(checks: Checks | None = None, pools: LivePools | None = None) -> None:
    """Run every jit kernel here from now on; a second call replaces checks and pools.

    TRITON_INTERPRET=1 must be set when the kernels are decorated: only interpreted functions can be replaced.
    pools: the tensors that raw addresses may reach; None leaves raw-address accesses unchecked.
    """
    global _installed
    settings = checks or Checks()
    if _installed is None:
        _installed = _Installed(InterpretedFunction.run)
    here = _installed

    def report(fault: KernelViolation) -> None:
        if settings.on_fault == "raise":
            raise fault
        _keep(fault)

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if warmup:
            return None
        number, here.launches = here.launches, here.launches + 1
        hooked = False
        try:
            kernel = compile_kernel(self.fn)
            for hook in self.pre_run_hooks:
                hook(*args, **kwargs)
                hooked = True
            launch = bind(kernel, args, kwargs, grid)

            def stock() -> None:
                plain = InterpretedFunction(self.fn)
                here.stock(plain, *args, grid=grid, warmup=False, **kwargs)

            return execute(launch, stock, settings, pools, number, report)
        except Unsupported as error:
            if any(getattr(value, "dtype", None) == torch.bfloat16 for value in (*args, *kwargs.values())):
                # the stock interpreter computes with the bits of bfloat16 as if they were integers
                raise KernelError(f"kernel {self.fn.__name__!r} cannot run with bfloat16 on a CPU: {error}") from error
            _fell_back(self.fn.__name__, str(error))
        except Unshadowed as error:
            _fell_back(self.fn.__name__, f"not compared, since Triton's interpreter cannot run it: {error}")
            return None
        except KernelViolation as fault:
            _keep(fault)
            raise
        # Hooks have run; a bare function runs none.
        target = InterpretedFunction(self.fn) if hooked else self
        return here.stock(target, *args, grid=grid, warmup=False, **kwargs)

    InterpretedFunction.run = run


def uninstall() -> None:
    """Give kernels back to the stock interpreter; nothing happens if not installed.  Compiled kernels are kept."""
    global _installed
    if _installed is not None:
        InterpretedFunction.run = _installed.stock
        _installed = None


@contextmanager
def installation(checks: Checks | None = None, pools: LivePools | None = None) -> Iterator[None]:
    """install() for the length of a block.  Not re-entrant: it ends uninstalled."""
    install(checks, pools)
    try:
        yield
    finally:
        uninstall()
