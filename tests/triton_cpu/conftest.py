"""Each test begins with nothing remembered, and ends with the runtime taken out again.

`--eagletwin-sglang` says which SGLang the tests import: some of their modules import it while they are collected.
"""

from collections.abc import Iterator

import pytest
import torch

from eagletwin.harness.core.errors import HarnessError
from eagletwin.harness.engines import triton_cpu
from eagletwin.harness.engines.source import use
from eagletwin.harness.testing.plugin import named_source


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    torch.set_num_threads(1)
    triton_cpu.clear()
    yield
    triton_cpu.uninstall()


def pytest_collectstart(collector: pytest.Collector) -> None:
    try:
        use(named_source(collector.config))
    except HarnessError as error:
        raise pytest.UsageError(str(error)) from error
