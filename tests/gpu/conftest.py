"""Tests that need a GPU: collected everywhere, and skipped with what is missing where there is none."""

import pytest

from eagletwin.harness.doctor import missing_for_cuda


@pytest.fixture(autouse=True, scope="session")
def needs_a_gpu() -> None:
    missing = missing_for_cuda()
    if missing is not None:
        pytest.skip(f"{missing[0]}: {missing[1]}")
