"""Verify that samples: the rejection kernel of a chain.

What it decided is followed coin by coin (reference/follow_sampling.py): float32 may decide otherwise than float64 only where a
coin comes within its error of a boundary, and never for a token without probability. The sampling of a tree is C++:
tests/kernels/sampled_trees.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from random import Random
from typing import Literal

import torch
from hypothesis import strategies as st
from torch import Tensor

from eagletwin.reference.block_verification import follow_block
from eagletwin.reference.follow_sampling import Draws, Followed, Walk, follow_chain
from eagletwin.reference.sampling import EXACT, Thresholds, children_of, keep_top_k
from eagletwin.reference.tree import accept_row, retrieve_links

from ..release import SAMPLING, load
from ..tier import fault, holds_for, same
from ..trees import Batch, batches

UNWRITTEN = -77
BLOCK = 4096  # tokens that the kernel takes at a time

Kind = Literal["other", "near", "same", "apart", "nan"]


def _siblings_differ(parents: Sequence[int], vocabulary: int, random: Random) -> list[int]:
    tokens = [0] * len(parents)
    for node in range(len(parents)):
        children = children_of(node, parents)
        for child, token in zip(children, random.sample(range(vocabulary), len(children)), strict=True):
            tokens[child] = token
    return tokens


@dataclass(frozen=True)
class SamplingCase:
    """spread: of the logits; top_k: how many tokens the target keeps. kind: how a chain's q lies to p. Thresholds: a tree's."""

    batch: Batch
    vocabulary: int
    spread: float
    top_k: int
    kind: Kind = "other"
    thresholds: Thresholds = EXACT
    strided: bool = False

    @cached_property
    def targets(self) -> Tensor:
        """[bs, nodes, V] float32."""
        logits = self._normal(self.batch.nodes, 1) * self.spread
        return keep_top_k(logits.softmax(-1), torch.tensor(self.top_k, device="cpu")).float()

    @cached_property
    def drafts(self) -> Tensor:
        """[bs, num_steps, V] float32: the distribution that each token of the chain was drawn from."""
        drafts = self._normal(self.batch.num_steps, 2).softmax(-1).float()
        if self.kind == "same":
            return self.targets[:, :-1].clone()
        if self.kind == "near":
            drafts = self.targets[:, :-1].double() * self._normal(self.batch.num_steps, 2).exp() + 1e-3
            return (drafts / drafts.sum(-1, keepdim=True)).float()
        if self.kind == "apart":
            drafts = drafts.double() * (self.targets[:, :-1] == 0) + 1e-12
            return (drafts / drafts.sum(-1, keepdim=True)).float()
        if self.kind == "nan" and len(drafts):
            drafts[0, self.batch.seed % self.batch.num_steps] = float("nan")
        return drafts

    @cached_property
    def candidates(self) -> list[list[int]]:
        """[bs][nodes]: siblings differ, and a chain's tokens are ones that its q can give."""
        if self.batch.topk == 1:
            random = Random(self.batch.seed)
            weights = self.drafts.nan_to_num(nan=1.0).tolist()
            return [[0, *(random.choices(range(self.vocabulary), row)[0] for row in rows)] for rows in weights]
        return [_siblings_differ(tree.parents, self.vocabulary, Random(self.batch.seed)) for tree in self.batch.trees]

    @property
    def coins(self) -> tuple[Tensor, Tensor]:
        """[bs, nodes] and [bs], float32, none of them 0 or within a rounding of 1: those have tests of their own."""
        count, generator = len(self.batch.trees), torch.Generator("cpu").manual_seed(self.batch.seed + 3)
        coins = torch.rand(count * (self.batch.nodes + 1), generator=generator, device="cpu").clamp(2**-20, 1 - 2**-12)
        return coins[: count * self.batch.nodes].reshape(count, self.batch.nodes), coins[count * self.batch.nodes :]

    def _normal(self, rows: int, stream: int) -> Tensor:
        generator = torch.Generator("cpu").manual_seed(self.batch.seed * 4 + stream)
        return torch.randn(len(self.batch.trees), rows, self.vocabulary, generator=generator, device="cpu", dtype=torch.float64)


@dataclass(frozen=True)
class Decided:
    """What a function wrote, checked for what it must not have: paths, each with the emitted tokens, the bonus the last."""

    paths: list[list[int]]
    emitted: list[list[int]]


def call(sample: Callable[..., None], case: SamplingCase, coins: Tensor, finals: Tensor, drafts: Tensor) -> Decided:
    """Call it as eagle_sample does, and read what it wrote."""
    count, nodes, width = len(case.batch.trees), case.batch.nodes, case.batch.num_steps + 1
    links = [retrieve_links(tree.parents) for tree in case.batch.trees]
    predicts = torch.full((count * nodes + 1,), UNWRITTEN, dtype=torch.int32)
    accepts = torch.full((count + 1, width), -1, dtype=torch.int32)
    counts = torch.full((count + 1,), UNWRITTEN, dtype=torch.int32)
    here = predicts.device
    sample(
        predicts=predicts[:-1],
        accept_index=accepts[:-1],
        accept_token_num=counts[:-1],
        candidates=laid_out(case, torch.tensor(case.candidates, dtype=torch.int64).reshape(count, nodes), 2**40),
        retrive_index=torch.arange(count * nodes).reshape(count, nodes),
        retrive_next_token=torch.tensor([link[0] for link in links], dtype=torch.int64).reshape(count, nodes),
        retrive_next_sibling=torch.tensor([link[1] for link in links], dtype=torch.int64).reshape(count, nodes),
        uniform_samples=laid_out(case, coins.to(here), 7.0),
        uniform_samples_for_final_sampling=finals.to(here),
        target_probs=laid_out(case, case.targets.to(here), 7.0),
        draft_probs=laid_out(case, drafts.to(here), -7.0),
        threshold_single=case.thresholds.single,
        threshold_acc=case.thresholds.acc,
        deterministic=True,
    )
    same("the count behind the last request", counts.tolist()[-1], UNWRITTEN)
    same("the row of accept_index behind the last request", set(accepts.tolist()[-1]), {-1})
    return _read(case, predicts.tolist(), accepts.tolist()[:-1], counts.tolist()[:-1])


def laid_out(case: SamplingCase, tensor: Tensor, between: float) -> Tensor:
    """The tensor, or a view of every second element of one twice as wide."""
    return torch.stack([tensor, torch.full_like(tensor, between)], -1)[..., 0] if case.strided else tensor


def _read(case: SamplingCase, predicts: list[int], accepts: list[list[int]], counts: list[int]) -> Decided:
    nodes = case.batch.nodes
    paths = [[node - first * nodes for node in row if node >= 0] for first, row in enumerate(accepts)]
    same(
        "accept_index", accepts, [accept_row(path, first * nodes, case.batch.num_steps + 1) for first, path in enumerate(paths)]
    )
    same("accept_token_num", counts, [len(path) - 1 for path in paths])
    written = {first * nodes + node for first, path in enumerate(paths) for node in path}
    same(
        "places written in predicts",
        [place for place, token in enumerate(predicts) if token != UNWRITTEN],
        sorted(written),
    )
    emitted = [[predicts[first * nodes + node] for node in path] for first, path in enumerate(paths)]
    for path, tokens, candidates in zip(paths, emitted, case.candidates, strict=True):
        same("accepted tokens", tokens[:-1], [candidates[node] for node in path[1:]])
    return Decided(paths, emitted)


def error_of(vocabulary: int) -> float:
    """Of a sum of float32 numbers that are themselves exact: their running sum, the product with the coin, a division."""
    return (vocabulary + 16) * 2.0**-24


def follow_chains(case: SamplingCase, decided: Decided, coins: Tensor, finals: Tensor) -> list[Followed]:
    error, steps = error_of(case.vocabulary), case.batch.num_steps
    return [
        follow_chain(
            [[row] for row in targets.double()],
            drafts.double(),
            candidates,
            Draws(coin.tolist(), float(final)),
            Walk(path, tokens[-1]),
            [error] * (steps + 1),
            [0.0] * steps,
        )
        for targets, drafts, candidates, coin, final, path, tokens in zip(
            case.targets, case.drafts, case.candidates, coins, finals, decided.paths, decided.emitted, strict=True
        )
    ]


@st.composite
def chains(draw: st.DrawFn) -> SamplingCase:
    vocabulary = draw(st.sampled_from([5, 5, 8, 64, BLOCK, 5000]))
    batch = draw(batches(chain=True, most=3 if vocabulary < BLOCK else 2))
    spread, top_k = draw(st.sampled_from([0.0, 1.0, 4.0])), draw(st.sampled_from([1, 2, vocabulary]))
    kind: Kind = draw(st.sampled_from(["near", "near", "other", "same", "apart", "nan"]))
    return SamplingCase(batch, vocabulary, spread or 0.1, top_k, kind, strided=draw(st.booleans()))


KERNEL, CALLER = f"{SAMPLING}.speculative_sampling_classic_kernel", f"{SAMPLING}.chain_speculative_sampling_triton"


@holds_for(
    chains(),
    fault(KERNEL, "q_is_prob & (coin * q < p)", "q_is_prob & (coin < p)"),
    fault(KERNEL, "target_u = coin_final * norm_sum", "target_u = coin_final"),
    fault(KERNEL, "            cum_sum += tl.sum(val)", "            cum_sum += 0.0"),
    fault(CALLER, "draft_probs.stride(0)", "target_probs.stride(0)"),
)
def chain_is_sampled(case: SamplingCase) -> None:
    coins, finals = case.coins
    decided = call(load(SAMPLING).chain_speculative_sampling_triton, case, coins, finals, case.drafts)
    same(
        "decisions that p, q and the coins do not allow",
        [found.illegal for found in follow_chains(case, decided, coins, finals)],
        [None] * len(decided.paths),
    )


@st.composite
def blocks(draw: st.DrawFn) -> SamplingCase:
    """Chains of which a beginning is often accepted, and not for certain: two drafts or more, and a q not far from p."""
    vocabulary = draw(st.sampled_from([5, 8, 64, 64, 5000]))
    batch = draw(batches(chain=True, least=1, most=6).filter(lambda batch: batch.num_steps > 1))
    kind: Kind = draw(st.sampled_from(["near", "near", "near", "same", "apart"]))
    return SamplingCase(
        batch, vocabulary, draw(st.sampled_from([0.5, 1.0, 2.0])), vocabulary, kind, strided=draw(st.booleans())
    )


@holds_for(
    blocks(),
    fault(KERNEL, "residual_mass + 1.0 - prefix_prob", "1.0"),
    fault(KERNEL, "residual_scale = prefix_prob", "residual_scale = 1.0"),
    fault(KERNEL, "norm_sum = residual_mass", "norm_sum = residual_mass * 0.5"),
    fault(CALLER, "BLOCK_VERIFICATION=block_verification", "BLOCK_VERIFICATION=False"),
)
def block_is_verified(case: SamplingCase) -> None:
    """The same kernel by another algorithm, from 0.5.22 on."""
    sample = partial(load(SAMPLING).chain_speculative_sampling_triton, block_verification=True)
    coins, finals = case.coins
    decided = call(sample, case, coins, finals, case.drafts)
    for targets, drafts, candidates, coin, final, path, tokens in zip(
        case.targets, case.drafts, case.candidates, coins, finals, decided.paths, decided.emitted, strict=True
    ):
        exact, q, error = targets.double(), drafts.double(), 4 * error_of(case.vocabulary)
        followed = follow_block(exact, q, candidates, coin.tolist(), float(final), len(path) - 1, tokens[-1], error)
        same("decision that p, q and the coins do not allow", followed.illegal, None)
