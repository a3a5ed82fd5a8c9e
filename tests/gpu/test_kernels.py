"""The kernel tier on a GPU: CUDA C++ builds and verifies trees here, and Triton's kernels are compiled.

The properties are those of `eagletwin kernels`, which has a fault for each; here their tensors lie on the GPU.
"""

import importlib
import os
from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from eagletwin.harness.commands.kernels.properties import commit, rotate, select, tree
from eagletwin.harness.commands.kernels.release import EAGLE, TOPK1, UTILS
from eagletwin.harness.commands.kernels.tier import Property, same_cases
from eagletwin.harness.core.run_spec import Mode
from eagletwin.harness.engines.source import INSTALLED, use
from eagletwin.harness.engines.start import _environment
from eagletwin.harness.testing.plugin import named_source

CASES = 60


@cache
def load(name: str) -> Any:
    """A module of SGLang, imported as the CUDA engine imports it. Releases differ in where some functions lie."""
    from eagletwin.harness.engines.sglang.boot import boot

    mode = Mode(device="cuda")
    os.environ.update(_environment(INSTALLED, mode))
    boot.import_sglang(mode)
    parts = [importlib.import_module(module) for module in (name, UTILS, EAGLE)]
    return SimpleNamespace(**{attribute: value for part in reversed(parts) for attribute, value in vars(part).items()})


@pytest.fixture(autouse=True)
def on_the_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("Triton's kernels are interpreted in this process: run these tests with TRITON_INTERPRET=0")
    use(named_source(request.config))  # before load() imports it
    for module in (commit, rotate, select, tree, tree):
        monkeypatch.setattr(module, "load", load)
    torch.set_default_device("cuda")
    yield
    torch.set_default_device("cpu")


def _property(module: Any, name: str) -> Property:
    found: Property = next(of for of in module.PROPERTIES if of.name == name)
    return found


def _something(case: Any) -> bool:
    """An empty batch is not launched on a GPU: CUDA refuses an empty grid, and SGLang never asks for one."""
    if hasattr(case, "batch"):
        return len(case.batch.trees) > 0
    return getattr(case, "count", 1) > 0 and len(getattr(case, "lengths", (1,))) > 0


@pytest.mark.parametrize(
    "of",
    [
        _property(tree, "tree is built"),
        _property(tree, "path is accepted"),
        _property(select, "tree grows"),
        _property(commit, "bonus is filled"),
        _property(rotate, "ids rotate"),
    ],
    ids=lambda of: of.name,
)
def test_property(of: Property) -> None:
    check(of.holds, of.cases.filter(_something))


def test_top1_of_a_chain() -> None:
    """The fused kernel, with the block size that is used; tests/kernels varies it."""
    module = load(TOPK1)
    for count, vocabulary in ((1, 5), (3, 96), (8, 128), (5, 5000)):
        generator = torch.Generator("cuda").manual_seed(count)
        logits = torch.randint(0, 50, (count, vocabulary), generator=generator).float()
        positions, drafted = torch.arange(count) + 40, torch.full((count, 5), -77)
        chances, index = module.draft_topk1_postprocess(logits, positions, drafted, 2)
        expected = [row.index(max(row)) for row in logits.tolist()]
        assert index.flatten().tolist() == expected
        assert chances.flatten().tolist() == [1.0] * count
        assert positions.tolist() == [41 + row for row in range(count)]
        assert drafted[:, 2].tolist() == expected
        drafted[:, 2] = -77
        assert bool((drafted == -77).all())


def check(holds: Callable[[Any], None], cases: Any) -> None:
    """Hold it against CASES cases, the same in every run."""

    def one(case: Any) -> None:
        holds(case)

    settings(same_cases(CASES))(given(case=cases)(one))()
