"""Verify that samples, on a GPU: the C++ of a tree and of the cuts, and Triton's kernel of a chain, compiled.

The properties are those of harness/commands/kernels/properties/sampling.py. Which release has which of the C++:
docs/findings/sampling.md.
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from eagletwin.harness.commands.kernels.properties import sampling
from eagletwin.harness.commands.kernels.release import SAMPLING
from eagletwin.harness.commands.kernels.trees import Batch, Tree

from ..kernels import cuts
from .test_kernels import check, load, on_the_gpu  # noqa: F401  the fixture is for every test of a module that has it

JIT = "sglang.kernels.ops.speculative.sampling"  # from 0.5.21 on; before, the sampling of a tree is in the wheel of sgl_kernel


@pytest.fixture(autouse=True)
def loaded_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "load", load)


def tree_sampler() -> Callable[..., None]:
    load(SAMPLING)
    found: Any = importlib.import_module(JIT if has_jit() else "sgl_kernel").tree_speculative_sampling_target_only
    sampler: Callable[..., None] = found
    return sampler


def has_jit() -> bool:
    return importlib.util.find_spec(JIT) is not None


def cut(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """What eagle_sample cuts with."""
    utilities = load(SAMPLING)
    function: Callable[[Tensor, Tensor], Tensor] = getattr(utilities, name, None) or getattr(
        importlib.import_module("sgl_kernel"), name
    )
    return function


def test_a_chain_is_sampled() -> None:
    check(sampling.chain_is_sampled, sampling.chains().filter(lambda case: len(case.batch.trees) > 0))


def test_a_tree_is_sampled() -> None:
    sampler = tree_sampler()
    trees = sampling.trees().filter(lambda case: len(case.batch.trees) > 0)
    check(lambda case: sampling.tree_is_sampled(case, sampler), trees)


@pytest.mark.parametrize("vocabulary", [32_000, 128_256])
def test_vocabularies_of_real_models(vocabulary: int) -> None:
    """Wide trees and chains; the targets keep 50 tokens or all."""
    wide = Tree(4, 3, ((0, 1, 2, 3), (4, 5, 8, 12), (20, 21, 24, 28)), (0, 1, 2, 4, 5, 8, 20, 21))
    chain = Tree(1, 3, ((0,), (1,), (2,)), (0, 1, 2))
    for seed in range(4):
        for top_k in (50, vocabulary):
            of_a_tree = Batch(4, 3, 9, (wide, wide), (0, 0), seed)
            sampling.tree_is_sampled(sampling.SamplingCase(of_a_tree, vocabulary, 4.0, top_k), tree_sampler())
            of_a_chain = Batch(1, 3, 4, (chain, chain), (0, 0), seed)
            sampling.chain_is_sampled(sampling.SamplingCase(of_a_chain, vocabulary, 4.0, top_k))


def test_the_largest_are_kept_with_what_ties() -> None:
    check(lambda case: cuts.largest_are_kept(case, cut("top_k_renorm_prob")), cuts.rows())


def test_the_fewest_are_kept_that_reach_a_mass() -> None:
    check(lambda case: cuts.mass_is_kept(case, cut("top_p_renorm_prob")), cuts.rows())


def test_a_coin_of_zero_and_a_child_without_probability() -> None:
    """Issue #35771: accepted up to 0.5.20, refused by what PR #35798 made of it."""
    decided, illegal = sampling.coin_of_zero(tree_sampler())
    if has_jit():
        assert (decided.paths, decided.emitted, illegal) == ([[0]], [[1]], None)
    else:
        assert decided.paths == [[0, 1]]
        assert illegal is not None
        assert illegal.why == "the target never draws this token"
