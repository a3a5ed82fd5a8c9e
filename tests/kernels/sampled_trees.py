"""The sampling of a tree, followed coin by coin: sgl_kernel's C++ on a GPU, and the engine's stand-in for it on a CPU."""

from collections.abc import Callable

import torch
from hypothesis import strategies as st
from torch import Tensor

from eagletwin.harness.commands.kernels.properties.sampling import BLOCK, Decided, SamplingCase, call, error_of
from eagletwin.harness.commands.kernels.tier import same
from eagletwin.harness.commands.kernels.trees import Batch, Tree, batches
from eagletwin.reference.follow_sampling import Draws, Followed, Illegal, Walk, follow_tree
from eagletwin.reference.sampling import Thresholds


@st.composite
def trees(draw: st.DrawFn) -> SamplingCase:
    """C++ wants everything contiguous, and its loads are of four, two or one of the vocabulary's tokens."""
    vocabulary = draw(st.sampled_from([5, 6, 8, 64, BLOCK + 1, 5000]))
    batch = draw(batches(most=3 if vocabulary < BLOCK else 1))
    single, acc = draw(st.sampled_from([1.0, 1.0, 0.3])), draw(st.sampled_from([1.0, 1.0, 0.5]))
    spread, top_k = draw(st.sampled_from([0.1, 1.0, 4.0])), draw(st.sampled_from([1, 2, vocabulary]))
    return SamplingCase(batch, vocabulary, spread, top_k, thresholds=Thresholds(single, acc))


def follow_trees(case: SamplingCase, decided: Decided, coins: Tensor, finals: Tensor) -> list[Followed]:
    error = error_of(case.vocabulary)
    return [
        follow_tree(
            [[row] for row in targets.double()],
            candidates,
            tree.parents,
            Draws(coin.tolist(), float(final)),
            Walk(path, tokens[-1]),
            [error] * case.batch.nodes,
            case.thresholds,
        )
        for targets, candidates, tree, coin, final, path, tokens in zip(
            case.targets, case.candidates, case.batch.trees, coins, finals, decided.paths, decided.emitted, strict=True
        )
    ]


def tree_is_sampled(case: SamplingCase, sample: Callable[..., None]) -> None:
    coins, finals = case.coins
    decided = call(sample, case, coins, finals, torch.zeros_like(case.targets))
    same(
        "decisions that p and the coins do not allow",
        [found.illegal for found in follow_trees(case, decided, coins, finals)],
        [None] * len(decided.paths),
    )


def coin_of_zero(sample: Callable[..., None]) -> tuple[Decided, Illegal | None]:
    """What is decided with a coin of 0 on a child that has no probability, and whether it may be."""
    pair = Tree(1, 1, ((0,),), (0,))
    case = SamplingCase(Batch(1, 1, 2, (pair,), (0,), 0), 4, 1.0, 4)
    targets = torch.tensor([[[0.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]], device="cpu")
    vars(case).update(targets=targets, candidates=[[0, 0]])
    coins, finals = torch.zeros(1, 2, device="cpu"), torch.tensor([0.5], device="cpu")
    decided = call(sample, case, coins, finals, torch.zeros_like(targets))
    return decided, follow_trees(case, decided, coins, finals)[0].illegal
