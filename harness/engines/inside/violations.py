"""What kernels did that they must not, as an ending of a case: the rules `kernel.*`."""

from collections.abc import Sequence

from eagletwin.harness.core.records import Ending
from eagletwin.harness.core.run_spec import Kernels
from eagletwin.harness.engines import triton_cpu

CHECKS: dict[Kernels, triton_cpu.Checks] = {
    "fast": triton_cpu.Checks(),
    "shadow": triton_cpu.Checks(shadow=True),
    "checked": triton_cpu.Checks(poison=True, races=True, order=0),
}

# Violation -> the rule that it breaks. Subclasses first.
RULES: list[tuple[type[triton_cpu.KernelViolation], str]] = [
    (triton_cpu.OutOfBounds, "kernel.memory"),
    (triton_cpu.PoisonLeak, "kernel.undefined"),
    (triton_cpu.OrderDependence, "kernel.order"),
    (triton_cpu.ShadowMismatch, "kernel.shadow"),
]


def ending_of(faults: Sequence[triton_cpu.KernelViolation], where: str) -> Ending | None:
    """How the case ended if a kernel did what it must not; None: none did."""
    if not faults:
        return None
    rule = next(rule for kind, rule in RULES if isinstance(faults[0], kind))
    return Ending(kind="faulted", detail=str(faults[0]), where=where, rule=rule, origin=faults[0].kernel)


def fallbacks() -> tuple[str, ...]:
    """Kernels that ran in Triton's interpreter, unchecked, although the fast runtime was asked for."""
    return tuple(f"{name}: {reason}" for name, reason in sorted(triton_cpu.fallbacks().items()))
