"""What executes the kernels of this tier (`--eagletwin-kernels`), and that it executed all of them itself."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from eagletwin.harness.engines import triton_cpu

from . import tier


@pytest.fixture(autouse=True)
def runtime(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test runs in it. Its name, for what only some runtimes can do."""
    pytest.importorskip("sglang")
    torch.set_num_threads(1)
    triton_cpu.clear()
    kernels = request.config.getoption("--eagletwin-kernels")
    with tier.running(kernels):
        yield kernels
    assert triton_cpu.fallbacks() == {}


@pytest.fixture(scope="session")
def config(request: pytest.FixtureRequest) -> settings:
    """How many cases: the same ones in every run, unless a profile of eagletwin's is asked for."""
    return settings() if request.config.getoption("--eagletwin-profile") else tier.same_cases()
