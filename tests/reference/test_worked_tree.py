"""EAGLE-2 worked by hand (arXiv 2406.16858, §4.1 expansion and §4.2 re-ranking), and against its words on paths of tokens.

The tree, k = 2 and 3 depths; each line is a candidate: its number, its token, its probability, and so its value

    0: A .5 = .50        its children   2: C .5 = .25   3: D .4 = .20
    1: B .4 = .40                       4: C .9 = .36   5: E .05 = .02

The second frontier is 4 (.36) and 2 (.25), in this order: branch 0 goes on from B's child, and branch 1 from A's.

    4: its children   6: D .7 = .252   7: A .2 = .072
    2: its children   8: E .6 = .15    9: B .3 = .075

Of six nodes, the root apart, five are the best: 0 (.50), 1 (.40), 4 (.36), 6 (.252), 2 (.25). In the order of their numbers:

    root ─┬─ 1: A ─── 3: C
          └─ 2: B ─── 4: C ─── 5: D
"""

import random

import pytest
import torch
from torch import Tensor

from eagletwin.reference import tree
from eagletwin.reference.growth import best_of, candidates, lineage, select
from eagletwin.reference.sizes import count_candidates

A, B, C, D, E = range(5)


def row(first: int, p: float, second: int, q: float) -> list[float]:
    """A distribution over the five tokens of which these two are the likeliest; the others share the rest, unevenly."""
    others = [token for token in range(5) if token not in (first, second)]
    rest = dict(zip(others, (share * (1 - p - q) for share in (0.5, 0.3, 0.2)), strict=True))
    return [{first: p, second: q, **rest}[token] for token in range(5)]


ROWS = [  # by row: the root, branches 0 and 1 of step 1, branches 0 and 1 of step 2
    row(A, 0.5, B, 0.4),
    row(C, 0.5, D, 0.4),
    row(C, 0.9, E, 0.05),
    row(D, 0.7, A, 0.2),
    row(E, 0.6, B, 0.3),
]
EXPANDED = [[0, 1], [4, 2]]
SELECTED = [0, 1, 2, 4, 6]
PARENTS = [-1, 0, 0, 1, 2, 4]


def logits(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).log()


def test_a_candidate_is_worth_the_product_of_the_probabilities_on_its_path() -> None:
    tokens, scores = candidates(logits(ROWS)[None], torch.tensor([EXPANDED]), topk=2)
    assert tokens.flatten().tolist() == [A, B, C, D, C, E, D, A, E, B]
    values = [0.5, 0.4, 0.25, 0.2, 0.36, 0.02, 0.252, 0.072, 0.15, 0.075]
    assert scores.exp().flatten().tolist() == pytest.approx(values)


def test_the_best_of_a_depth_are_expanded_best_first() -> None:
    _, scores = candidates(logits(ROWS[:3])[None], torch.tensor([[[0, 1]]]), topk=2)
    assert (best_of(scores.flatten()[2:], 2) + 2).tolist() == EXPANDED[1]


def test_the_best_of_all_are_verified_in_the_order_of_their_numbers() -> None:
    assert select(logits(ROWS), torch.tensor(EXPANDED), topk=2, count=5) == (SELECTED, [A, B, C, C, D])


def test_what_verification_needs_follows_from_who_is_whose_parent() -> None:
    assert tree.tree_parents(SELECTED, 2, [0, 1, 4, 2]) == PARENTS
    assert tree.depths(PARENTS) == [0, 1, 1, 2, 2, 3]
    assert tree.ancestor_mask(PARENTS).int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 0, 1, 0, 1, 0],
        [1, 0, 1, 0, 1, 1],
    ]
    assert tree.retrieve_links(PARENTS) == ([1, 3, 4, -1, 5, -1], [-1, 2, -1, -1, -1, -1])


def test_leaf_paths_are_the_published_retrieve_indices_without_their_padding() -> None:
    """SafeAILab/EAGLE fills the rows of this table up with -1."""
    paths = tree.leaf_paths(PARENTS)
    width = max(map(len, paths))
    assert [path + [-1] * (width - len(path)) for path in paths] == [[0, 1, 3, -1], [0, 2, 4, 5]]


def test_the_published_parent_table_is_this_one_with_the_root_as_zero() -> None:
    """SafeAILab/EAGLE numbers candidates from 1 there, and the root 0; who proposed a candidate is found by n // k in both."""
    published = [0, 1, 2, 5, 3]
    expanded = [0, 1, 4, 2]
    for candidate in range(10):
        assert published[candidate // 2] - 1 == tree.parent_of(candidate, 2, expanded)


def test_both_views_of_who_sees_whom_while_drafting() -> None:
    """Step 2 has B's child on branch 0 and A's child on branch 1: in the slots they find each other's parent."""
    expanded = torch.tensor([EXPANDED])
    true, slots = (lineage(expanded, view)[0, 2:, :2].int().tolist() for view in ("true_tree", "slot_layout"))
    assert true == [[0, 1], [1, 0]]
    assert slots == [[1, 0], [0, 1]]


def test_of_equal_values_the_shallower_node_is_selected_so_that_the_tree_hangs_together() -> None:
    """§4.2. A's first child is certain: both are worth .5, and only A may go without the other."""
    certain = [row(A, 0.5, B, 0.3), [0.0, 0.0, 1.0, 0.0, 0.0], row(C, 0.5, D, 0.4)]
    for count, selected in ((1, [0]), (2, [0, 2]), (3, [0, 1, 2])):
        assert select(logits(certain), torch.tensor([[0, 1]]), topk=2, count=count)[0] == selected


@pytest.mark.parametrize("seed", range(20))
def test_the_numbered_tree_is_the_papers_tree_of_token_paths(seed: int) -> None:
    """The paper's words without a number of ours: a node is its path of tokens, and its value a product in exact order."""
    generator = random.Random(seed)
    topk, num_steps = generator.choice([(1, 4), (2, 3), (3, 4), (4, 2), (5, 3)])
    count = generator.randint(num_steps, count_candidates(topk, num_steps))
    told: dict[tuple[int, ...], list[float]] = {}

    def distribution(path: tuple[int, ...]) -> list[float]:
        weights = told.setdefault(path, [generator.random() ** 4 + 1e-3 for _ in range(9)])
        return [weight / sum(weights) for weight in weights]

    values: dict[tuple[int, ...], float] = {(): 1.0}
    layer: list[tuple[int, ...]] = [()]
    layers = []
    for _ in range(num_steps):
        layers.append(layer)
        children = {}
        for path in layer:
            odds = distribution(path)
            for token in sorted(range(9), key=lambda token: -odds[token])[:topk]:
                children[(*path, token)] = values[path] * odds[token]
        values |= children
        layer = sorted(children, key=lambda path: -children[path])[:topk]
    best = {(), *sorted((path for path in values if path), key=lambda path: -values[path])[:count]}

    rows, expanded = logits([distribution(()), *(distribution(path) for later in layers[1:] for path in later)]), []
    for step in range(1, num_steps):
        so_far = torch.tensor(expanded, dtype=torch.int64).reshape(1, step - 1, topk)
        scores = candidates(rows[None, : 1 + (step - 1) * topk], so_far, topk)[1][0]
        newest = scores[0] if step == 1 else scores[1 + (step - 2) * topk :].flatten()
        expanded.append((best_of(newest, topk) + scores.numel() - newest.numel()).tolist())
    selected, tokens = select(rows, torch.tensor(expanded, dtype=torch.int64).reshape(num_steps - 1, topk), topk, count)
    parents = tree.tree_parents(selected, topk, [candidate for frontier in expanded for candidate in frontier])
    nodes = [tuple(([-1, *tokens])[node] for node in tree.path_to(end, parents)[1:]) for end in range(count + 1)]

    assert set(nodes) == best
    assert tree.depths(parents) == [len(path) for path in nodes]
    sees = tree.ancestor_mask(parents)
    assert sees.tolist() == [[path[: len(other)] == other for other in nodes] for path in nodes]
    leaves = {path for path in best if not any(other[:-1] == path for other in best if other)}
    assert {nodes[path[-1]] for path in tree.leaf_paths(parents)} == leaves
