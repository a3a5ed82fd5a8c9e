"""What a test of this tier is made of: a property of one or more of SGLang's functions, the cases that it holds for, and for
each function a fault which makes it fail. `docs/kernels.md` lists them all.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from eagletwin.cases import profiles
from eagletwin.harness.engines import triton_cpu
from eagletwin.harness.engines.sglang.kernels import CHECKS
from eagletwin.harness.engines.wire import Kernels
from eagletwin.harness.patch import Edit

from .plant import planted
from .release import TREE, load

CASES = 120  # of each property: seconds for the tier, and five times what any planted fault needed


@dataclass(frozen=True)
class Property:
    """`holds(case)` raises AssertionError, or the runtime a KernelViolation, unless SGLang does what reference/ says.

    faults: one edit or more for every function of SGLang that the property is about; each must make it fail.
    """

    name: str
    cases: st.SearchStrategy[Any]
    holds: Callable[[Any], None]
    faults: tuple[Edit, ...]

    @property
    def functions(self) -> list[str]:
        """Dotted names of what it is about."""
        return list(dict.fromkeys(fault.target for fault in self.faults))

    def check(self, config: settings) -> None:
        """Hold it against this many cases; the smallest that fails is shown."""
        config(given(case=self.cases)(_named(self)))()

    def catches(self, fault: Edit, config: settings) -> Any:
        """A case that fails with this fault planted, and holds without it; AssertionError if there is none."""
        load(TREE)  # a fault is planted in what is imported
        with planted(fault):
            case = self.failing(config)
        assert case is not None, f"{self.name}: nothing failed with {fault.match!r} as {fault.replacement!r}"
        self.holds(case)
        return case

    def failing(self, config: settings) -> Any:
        """The first case that fails; None if none does."""

        def fails(case: Any) -> bool:
            try:
                self.holds(case)
            except (AssertionError, triton_cpu.KernelViolation):
                return True
            return False

        try:
            return find(self.cases, fails, settings=settings(config, phases=(Phase.generate,)))
        except NoSuchExample:
            return None


def _named(of: Property) -> Callable[[Any], None]:
    def holds(case: Any) -> None:
        of.holds(case)

    holds.__qualname__ = holds.__name__ = of.name.replace(" ", "_")  # what is drawn depends on the name, and on nothing else
    return holds


def same_cases(count: int = CASES) -> settings:
    """Settings which draw the same cases in every run, on any machine."""
    profiles.register()
    profiles.draw_from_seeds_alone()
    quiet = [*settings.get_profile("eagletwin-ci").suppress_health_check, HealthCheck.filter_too_much]
    return settings(settings.get_profile("eagletwin-ci"), max_examples=count, suppress_health_check=quiet)


def make_tests(properties: tuple[Property, ...]) -> tuple[Callable[..., None], Callable[..., None]]:
    """The two tests of a file: each property holds, and each planted fault is caught by it."""
    faults = [(of, fault) for of in properties for fault in of.faults]
    names = [f"{fault.target.rpartition('.')[2]}-{number}" for number, (_, fault) in enumerate(faults)]

    @pytest.mark.parametrize("of", properties, ids=lambda of: of.name)
    def test_property(of: Property, config: settings) -> None:
        of.check(config)

    @pytest.mark.parametrize(("of", "fault"), faults, ids=names)
    def test_planted_fault_is_caught(of: Property, fault: Edit, config: settings) -> None:
        of.catches(fault, config)

    return test_property, test_planted_fault_is_caught


POOLS = triton_cpu.LivePools()  # what raw addresses may reach: a property registers its KV pools for as long as it holds


@contextmanager
def running(kernels: Kernels = "fast") -> Iterator[None]:
    """Run kernels as asked; what torch.empty returns is poison, so that an output which nobody wrote cannot pass."""
    with triton_cpu.poison_empty():
        if kernels == "interpreter":
            yield
            return
        with triton_cpu.installed(CHECKS[kernels], POOLS):
            yield
