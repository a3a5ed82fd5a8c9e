"""Which runtime executes the kernels of this tier, and that it executed all of them itself.

`pytest tests/kernels --kernels shadow` (or checked, or interpreter) is the same tier in Triton's interpreter as well.
"""

from collections.abc import Iterator
from typing import get_args

import pytest
import torch
from hypothesis import settings

from eagletwin.harness.engines import triton_cpu

from . import tier


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("eagletwin")
    group.addoption("--kernels", choices=get_args(tier.Runtime), default="fast", help="what executes kernels in tests/kernels")


@pytest.fixture(autouse=True)
def runtime(request: pytest.FixtureRequest) -> Iterator[None]:
    pytest.importorskip("sglang")
    torch.set_num_threads(1)
    triton_cpu.clear()
    with tier.running(request.config.getoption("--kernels")):
        yield
    assert triton_cpu.fallbacks() == {}


@pytest.fixture(scope="session")
def config(request: pytest.FixtureRequest) -> settings:
    """How many cases: the same ones in every run, unless a profile of eagletwin's is asked for."""
    return settings() if request.config.getoption("--eagletwin-profile") else tier.same_cases()
