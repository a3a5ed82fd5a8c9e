"""Tests that need a GPU: collected everywhere; without a GPU they are skipped, and say what is missing."""

import pytest

from eagletwin.harness.engines.cuda_here import missing_for_cuda


@pytest.fixture(autouse=True, scope="session")
def needs_a_gpu() -> None:
    missing = missing_for_cuda()
    if missing is not None:
        pytest.skip(f"{missing[0]}: {missing[1]}")
