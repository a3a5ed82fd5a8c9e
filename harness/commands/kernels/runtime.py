"""The runtime that executes the kernels of the tier, and the errors that it raises.

Imports Triton: only the process that runs the tier needs it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from eagletwin.harness.core.run_spec import Kernels
from eagletwin.harness.engines import triton_cpu
from eagletwin.harness.engines.sglang.kernels import CHECKS

WRONG = (AssertionError, triton_cpu.KernelViolation)
"""What says that SGLang is wrong. Any other exception says that the comparison was not made."""

LIVE = triton_cpu.LivePools()  # what raw addresses may reach: a property registers its KV pools for as long as it holds


@contextmanager
def running(kernels: Kernels = "fast") -> Iterator[None]:
    """Run kernels as asked; torch.empty returns poison, so that an output which was never written cannot pass."""
    with triton_cpu.poison_empty():
        if kernels == "interpreter":
            yield
            return
        with triton_cpu.installed(CHECKS[kernels], LIVE):
            yield
