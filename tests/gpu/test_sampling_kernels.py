"""Verify that samples, on a GPU: the C++ of a tree and of the cuts, and Triton's kernel of a chain, compiled.

The properties are those of tests/kernels/test_sampling.py. Which release has which of the C++: docs/findings/sampling.md.
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from eagletwin.reference.sampling import keep_top_k, keep_top_p

from ..kernels import test_sampling
from ..kernels.release import SAMPLING
from ..kernels.trees import Batch, Tree
from .test_kernels import check, load, on_the_gpu  # noqa: F401  the fixture is for every test of a module that has it

JIT = "sglang.kernels.ops.speculative.sampling"  # from 0.5.21 on; before, the sampling of a tree is in the wheel of sgl_kernel


@pytest.fixture(autouse=True)
def loaded_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_sampling, "load", load)


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
    check(test_sampling.chain_is_sampled, test_sampling.chains().filter(lambda case: len(case.batch.trees) > 0))


def test_a_tree_is_sampled() -> None:
    sampler = tree_sampler()
    trees = test_sampling.trees().filter(lambda case: len(case.batch.trees) > 0)
    check(lambda case: test_sampling.tree_is_sampled(case, sampler), trees)


@pytest.mark.parametrize("vocabulary", [32_000, 128_256])
def test_vocabularies_of_real_models(vocabulary: int) -> None:
    """Wide trees and chains; the targets keep 50 tokens or all."""
    wide = Tree(4, 3, ((0, 1, 2, 3), (4, 5, 8, 12), (20, 21, 24, 28)), (0, 1, 2, 4, 5, 8, 20, 21))
    chain = Tree(1, 3, ((0,), (1,), (2,)), (0, 1, 2))
    for seed in range(4):
        for top_k in (50, vocabulary):
            of_a_tree = Batch(4, 3, 9, (wide, wide), (0, 0), seed)
            test_sampling.tree_is_sampled(test_sampling.Sampling(of_a_tree, vocabulary, 4.0, top_k), tree_sampler())
            of_a_chain = Batch(1, 3, 4, (chain, chain), (0, 0), seed)
            test_sampling.chain_is_sampled(test_sampling.Sampling(of_a_chain, vocabulary, 4.0, top_k))


@dataclass(frozen=True)
class Rows:
    """Distributions with equal entries among them, as whole numbers of a common unit; limits lie between two sums of theirs."""

    counts: tuple[tuple[int, ...], ...]
    cuts: tuple[int, ...]  # per row; for top_k as they are

    @property
    def chances(self) -> Tensor:
        weights = torch.tensor(self.counts, dtype=torch.float64, device="cpu")
        return (weights / weights.sum(-1, keepdim=True)).float()

    @property
    def top_k(self) -> Tensor:
        return torch.tensor(self.cuts, dtype=torch.int32, device="cpu")

    @property
    def top_p(self) -> Tensor:
        """[rows] float32: half way between a sum of whole units and the next; 1 where the cut is 0."""
        units = [sum(row) for row in self.counts]
        limits = [(of % total + 0.5) / total if of else 1.0 for of, total in zip(self.cuts, units, strict=True)]
        return torch.tensor(limits, dtype=torch.float32, device="cpu")


@st.composite
def rows(draw: st.DrawFn) -> Rows:
    vocabulary = draw(st.sampled_from([3, 4, 5, 17, 96, 1000, 4097]))
    count, seed = draw(st.integers(1, 4)), draw(st.integers(0, 2**16))
    generator = torch.Generator("cpu").manual_seed(seed)
    counts = torch.randint(0, draw(st.sampled_from([2, 5, 50])), (count, vocabulary), generator=generator, device="cpu")
    counts[:, seed % vocabulary] += 1  # never nothing
    cuts = tuple(draw(st.integers(0, vocabulary + 2)) for _ in range(count))
    return Rows(tuple(tuple(row) for row in counts.tolist()), cuts)


def same(found: Tensor, expected: Tensor) -> None:
    """The same tokens are kept, with the same chances."""
    assert (found.cpu() > 0).tolist() == (expected > 0).tolist()
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-5, atol=1e-9)


def largest_are_kept(case: Rows) -> None:
    kept = case.top_k.clamp(min=1)
    same(cut("top_k_renorm_prob")(case.chances.cuda(), kept.cuda()), keep_top_k(case.chances.double(), kept.long()))


def test_the_largest_are_kept_with_what_ties() -> None:
    check(largest_are_kept, rows())


def mass_is_kept(case: Rows) -> None:
    limits = case.top_p
    same(cut("top_p_renorm_prob")(case.chances.cuda(), limits.cuda()), keep_top_p(case.chances.double(), limits.double()))


def test_the_fewest_are_kept_that_reach_a_mass() -> None:
    check(mass_is_kept, rows())


def test_a_coin_of_zero_and_a_child_without_probability() -> None:
    """Issue #35771: accepted up to 0.5.20, refused by what PR #35798 made of it."""
    pair = Tree(1, 1, ((0,),), (0,))
    targets = torch.tensor([[[0.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]])
    case = test_sampling.Sampling(Batch(1, 1, 2, (pair,), (0,), 0), 4, 1.0, 4)
    vars(case).update(targets=targets.cpu(), candidates=[[0, 0]])
    coins, finals = torch.zeros(1, 2, device="cpu"), torch.tensor([0.5], device="cpu")
    decided = test_sampling.call(tree_sampler(), case, coins, finals, torch.zeros(1, 2, 4))
    illegal = test_sampling.follow_trees(case, decided, coins, finals)[0].illegal
    if has_jit():
        assert (decided.paths, decided.emitted, illegal) == ([[0]], [[1]], None)
    else:
        assert decided.paths == [[0, 1]]
        assert illegal is not None
        assert illegal.why == "the target never draws this token"
