"""Each test begins with nothing remembered, and ends with the runtime taken out again."""

from collections.abc import Iterator

import pytest
import torch

from eagletwin.harness.engines import triton_cpu


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    torch.set_num_threads(1)
    triton_cpu.clear()
    yield
    triton_cpu.uninstall()
