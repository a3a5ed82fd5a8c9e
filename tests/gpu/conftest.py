"""Tests that need a GPU: collected everywhere; without a GPU they are skipped, and say what is missing."""

import pytest

from eagletwin.harness.engines.machine import missing_for_cuda


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Packages that SGLang imports on a GPU warn of each other (FlashInfer uses names that CUTLASS has moved)."""
    for item in items:
        if "tests/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"))


@pytest.fixture(autouse=True, scope="session")
def needs_a_gpu() -> None:
    missing = missing_for_cuda()
    if missing is not None:
        pytest.skip(f"{missing[0]}: {missing[1]}")
