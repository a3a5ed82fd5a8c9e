"""The two tests that each file of properties has: each property holds, and each planted fault is caught by it."""

from collections.abc import Callable

import pytest
from hypothesis import settings

from eagletwin.harness.commands.kernels.tier import Property
from eagletwin.harness.core.patch import Edit


def make_tests(properties: tuple[Property, ...]) -> tuple[Callable[..., None], Callable[..., None]]:
    """(test_property, test_planted_fault_is_caught) of these properties."""
    faults = [(of, fault) for of in properties for fault in of.faults]
    names = [f"{fault.target.rpartition('.')[2]}-{number}" for number, (_, fault) in enumerate(faults)]

    @pytest.mark.parametrize("of", properties, ids=lambda of: of.name)
    def test_property(of: Property, config: settings) -> None:
        of.check(config)

    @pytest.mark.parametrize(("of", "fault"), faults, ids=names)
    def test_planted_fault_is_caught(of: Property, fault: Edit, config: settings) -> None:
        of.catches(fault, config)

    return test_property, test_planted_fault_is_caught
