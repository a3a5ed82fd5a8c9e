"""Draft trees for the properties of this tier: shapes drawn by Hypothesis, the rest from one seed, so that a case costs
microseconds. Any tree that SGLang can draft can come out, also one that no probabilities would lead to.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
from hypothesis import strategies as st
from torch import Tensor

from eagletwin.reference.sizes import count_candidates
from eagletwin.reference.tree import path_to, tree_parents


@dataclass(frozen=True)
class Tree:
    """One request's tree: `selected` and the frontier of each depth, as reference/tree.py numbers candidates."""

    topk: int
    num_steps: int
    frontiers: tuple[tuple[int, ...], ...]
    selected: tuple[int, ...]

    @property
    def parents(self) -> list[int]:
        return tree_parents(self.selected, self.topk, self.expanded)

    @property
    def expanded(self) -> list[int]:
        """Every frontier but the last, which proposes nothing any more."""
        return [candidate for frontier in self.frontiers[: self.num_steps - 1] for candidate in frontier]

    @property
    def parent_list(self) -> list[int]:
        """SGLang's: -1 for the root, then what was expanded. Empty for one step: nothing asks then."""
        return [-1, *self.expanded] if self.expanded else []


@dataclass(frozen=True)
class Batch:
    """Trees of one shape, the committed length of each request, and a seed for what else a property needs."""

    topk: int
    num_steps: int
    nodes: int
    trees: tuple[Tree, ...]
    lengths: tuple[int, ...]
    seed: int

    @property
    def parent_list(self) -> Tensor:
        """[bs, entries] int64, as SGLang's organize_draft_results returns it."""
        width = len(self.trees[0].parent_list) if self.trees else 1
        return torch.tensor([tree.parent_list for tree in self.trees], dtype=torch.int64).reshape(len(self.trees), width)

    @property
    def selected(self) -> Tensor:
        """[bs, nodes - 1] int64."""
        chosen = [tree.selected for tree in self.trees]
        return torch.tensor(chosen, dtype=torch.int64).reshape(len(self.trees), self.nodes - 1)

    @property
    def paths(self) -> list[list[int]]:
        """The accepted path of each tree: it leads to any node."""
        random = Random(self.seed)
        return [path_to(random.randrange(self.nodes), tree.parents) for tree in self.trees]


def grow(random: Random, topk: int, num_steps: int, nodes: int) -> Tree:
    """A tree of `nodes` nodes, the root included: any frontiers, and any selection that is closed under parents."""
    square = topk * topk
    frontiers = [tuple(range(topk))]
    for depth in range(2, num_steps + 1):
        first = topk + (depth - 2) * square
        frontiers.append(tuple(first + place for place in random.sample(range(square), topk)))
    selected: list[int] = []
    reachable = list(range(topk))
    while len(selected) < nodes - 1:
        candidate = reachable.pop(random.randrange(len(reachable)))
        selected.append(candidate)
        reachable += children(candidate, topk, num_steps, frontiers)
    return Tree(topk, num_steps, tuple(frontiers), tuple(sorted(selected)))


def children(candidate: int, topk: int, num_steps: int, frontiers: Sequence[Sequence[int]]) -> list[int]:
    """Candidates that this one proposed: k if it was expanded, else none."""
    depth = 1 if candidate < topk else 2 + (candidate - topk) // (topk * topk)
    frontier = frontiers[depth - 1]
    if depth == num_steps or candidate not in frontier:
        return []
    first = topk + (depth - 1) * topk * topk + frontier.index(candidate) * topk
    return list(range(first, first + topk))


@st.composite
def batches(draw: st.DrawFn, least: int = 0, most: int = 3, chain: bool = False) -> Batch:
    """topk 1 and depth 1 are the smallest; `least` requests or more."""
    topk = 1 if chain else draw(st.integers(1, 4))
    num_steps = draw(st.integers(1, 4))
    nodes = num_steps + 1 if topk == 1 else draw(st.integers(2, min(count_candidates(topk, num_steps), 12) + 1))
    lengths = draw(st.lists(st.integers(0, 9), min_size=least, max_size=most))
    seed = draw(st.integers(0, 2**16 - 1))
    random = Random(seed)
    trees = tuple(grow(random, topk, num_steps, nodes) for _ in lengths)
    return Batch(topk, num_steps, nodes, trees, tuple(lengths), seed)
