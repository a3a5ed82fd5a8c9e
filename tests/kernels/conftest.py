"""Which SGLang this process imports (`--eagletwin-sglang`), and what executes its kernels (`--eagletwin-kernels`)."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from eagletwin.harness.commands.kernels import tier
from eagletwin.harness.commands.kernels.runtime import running
from eagletwin.harness.engines import triton_cpu
from eagletwin.harness.engines.source import use
from eagletwin.harness.testing.plugin import named_source


@pytest.fixture(autouse=True)
def runtime(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test runs in it. Its name, for what only some runtimes can do."""
    use(named_source(request.config))  # before the first import; an error where another SGLang is imported already
    pytest.importorskip("sglang")
    torch.set_num_threads(1)
    triton_cpu.clear()
    kernels = request.config.getoption("--eagletwin-kernels")
    with running(kernels):
        yield kernels
    assert triton_cpu.fallbacks() == {}


@pytest.fixture(scope="session")
def config(request: pytest.FixtureRequest) -> settings:
    """How many cases: the same ones in every run, unless a profile of eagletwin's is asked for."""
    return settings() if request.config.getoption("--eagletwin-profile") else tier.same_cases()
