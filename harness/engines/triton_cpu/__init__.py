"""A fast runtime for Triton kernels on CPU tensors: each `@triton.jit` kernel's own source runs over numpy values,
with every memory access checked, in place of Triton's interpreter.  It knows no framework; install() it before the
first launch.

    from eagletwin.harness.engines import triton_cpu

    triton_cpu.install(triton_cpu.Checks(poison=True), pools)
"""

from .checks import Checks
from .compiler import dotted_name, precompile, stored_names, watch
from .dtypes import poison, poison_empty
from .install import clear, fallbacks, faults, install, installation, launches, uninstall, watch_fallbacks
from .pools import LivePools
from .state import KernelError, KernelViolation, OrderDependence, OutOfBounds, PoisonLeak, ShadowMismatch, UnregisteredAddress

__all__ = [
    "Checks",
    "KernelError",
    "KernelViolation",
    "LivePools",
    "OrderDependence",
    "OutOfBounds",
    "PoisonLeak",
    "ShadowMismatch",
    "UnregisteredAddress",
    "clear",
    "dotted_name",
    "fallbacks",
    "faults",
    "install",
    "installation",
    "launches",
    "poison",
    "poison_empty",
    "precompile",
    "stored_names",
    "uninstall",
    "watch",
    "watch_fallbacks",
]
