"""Draft trees: by hand (arXiv 2406.16858), all rounds at once against one at a time, and behind every position."""

import dataclasses
import functools
import random
from itertools import product

import pytest
import torch
from torch import Tensor

from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.weights import model_pair
from eagletwin.reference import tree
from eagletwin.reference.chain import Chain, committed_rows, draft_chain, rows_behind
from eagletwin.reference.eagle import Head
from eagletwin.reference.everywhere import chains_everywhere, layers_everywhere
from eagletwin.reference.growth import Growth, View, best_of, candidates, draft_tree, lineage, path_sums, select
from eagletwin.reference.llama import target_rows
from eagletwin.reference.mtp import draft_extend
from eagletwin.reference.rounds import committed_side_by_side, draft_rounds, grow_rounds
from eagletwin.reference.sizes import count_candidates

from ..rows import long, spread

# Draft trees: hand-worked growth, the chain as the tree of topk 1, and all rounds at once against one at a time.


# Both forms do the same float64 sums in another order; rows are of size 1 to 10.
SAME = 1e-11


@functools.cache
def _request(name: str, length: int, seed: int) -> tuple[Head, Tensor, Tensor]:
    recipe, pair = RECIPES[name], model_pair(name)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, recipe.target.vocab_size, (length,), generator=generator)
    return pair.reference_heads(recipe)[0], tokens, target_rows(pair.reference_target(), recipe.target, tokens).hidden


def _apart(mine: Tensor, other: Tensor) -> float:
    """Largest difference. Logits of a token that cannot be proposed are -inf in both."""
    return float(torch.where(mine == other, 0.0, (mine - other).abs()).max())


def _logits(*probabilities: list[float]) -> Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def test_scores_are_products_along_the_path() -> None:
    """k = 2, S = 2: the root proposes tokens 0 (0.6) and 1 (0.3); token 0's row proposes 1 and 2, token 1's row 0 and 2."""
    logits = _logits([0.6, 0.3, 0.1], [0.1, 0.5, 0.4], [0.7, 0.1, 0.2])
    tokens, scores = candidates(logits[None], torch.tensor([[[0, 1]]]), topk=2)
    assert tokens[0].tolist() == [[0, 1], [1, 2], [0, 2]]
    assert scores[0].exp().flatten().tolist() == pytest.approx([0.6, 0.3, 0.6 * 0.5, 0.6 * 0.4, 0.3 * 0.7, 0.3 * 0.2])


def test_the_best_of_all_depths_are_selected_in_index_order() -> None:
    """Of the tree above, with 4 draft tokens: 0.6, 0.3, 0.30 and not 0.24. Candidate 2 is the child of candidate 0."""
    logits = _logits([0.6, 0.31, 0.09], [0.1, 0.5, 0.4], [0.7, 0.1, 0.2])
    assert select(logits, torch.tensor([[0, 1]]), topk=2, count=3) == ([0, 1, 2], [0, 1, 1])


def test_of_equal_scores_the_smaller_number_is_taken() -> None:
    assert best_of(torch.tensor([0.1, 0.5, 0.5, 0.9]), 3).tolist() == [3, 1, 2]


def test_path_sums_follow_the_frontier_in_its_order() -> None:
    """The second step expands candidates 5 (of the second branch) and 2 (of the first), in that order."""
    values = torch.tensor([[[1, 2], [10, 20], [30, 40], [100, 200], [300, 400]]])
    sums = path_sums(values, torch.tensor([[[0, 1], [5, 2]]]), topk=2)
    assert sums.tolist() == [[[1, 2], [11, 21], [32, 42], [142, 242], [311, 411]]]


def test_the_two_views_differ_where_a_branch_has_another_parent() -> None:
    """At step 2 branch 0 expands candidate 4 (4 // 2 = row 2, so of branch 1) and branch 1 candidate 2 (of branch 0).

    Scratch rows are numbered 0, 1 (step 1) and 2, 3 (step 2).
    """
    expanded = torch.tensor([[[0, 1], [4, 2]]])
    assert lineage(expanded, "true_tree")[0].int().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 1]]
    assert lineage(expanded, "slot_layout")[0].int().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1]]


@pytest.mark.parametrize("view", ["true_tree", "slot_layout"])
@pytest.mark.parametrize("num_steps", [*long(1, 2), 5])
@pytest.mark.parametrize("name", sorted(name for name in RECIPES if not (RECIPES[name].mtp_layers or RECIPES[name].frozen)))
def test_the_tree_of_topk_1_is_the_chain(name: str, num_steps: int, view: View) -> None:
    head, tokens, hidden = _request(name, 12, seed=5)
    tree, chain = draft_tree(head, tokens, hidden, 1, num_steps, view), draft_chain(head, tokens, hidden, num_steps)
    assert [*tree.tokens.flatten().tolist(), int(tree.logits[-1].argmax())] == chain.drafted.tolist()
    for mine, other in ((tree.logits, chain.logits), (tree.keys[:, 0], chain.keys), (tree.hidden[:, 0], chain.hidden)):
        assert mine.shape == other.shape
        assert not mine.numel() or _apart(mine, other) < SAME


def test_a_true_tree_gives_each_branch_what_a_chain_of_its_own_would() -> None:
    """Every node of a true tree is the end of a chain, and its row is that chain's."""
    head, tokens, hidden = _request("llama-tiny", 10, seed=6)
    tree = draft_tree(head, tokens, hidden, topk=3, num_steps=4)
    proposed, _ = candidates(tree.logits[None], tree.expanded[None], 3)
    flat = proposed.flatten().tolist()
    for branch in range(3):
        path, candidate = [], int(tree.expanded[2, branch])
        while candidate >= 0:
            path.insert(0, flat[candidate])
            row = candidate // 3
            candidate = -1 if row == 0 else int(tree.expanded.flatten()[row - 1])
        chain = draft_chain(head, tokens, hidden, num_steps=4, drafted=[*path, 0])
        assert (tree.keys[2, branch] - chain.keys[2]).abs().max() < SAME
        assert (tree.handed_on[2, branch] - chain.handed_on[2]).abs().max() < SAME


def test_the_views_part_from_the_third_step_on() -> None:
    """Seed 6 is one where the frontier changes its order, as most are."""
    head, tokens, hidden = _request("llama-tiny", 10, seed=6)
    true, slots = (draft_tree(head, tokens, hidden, topk=3, num_steps=4, view=view) for view in ("true_tree", "slot_layout"))
    assert (true.keys[0] - slots.keys[0]).abs().max() < SAME
    assert (true.expanded[:2] == slots.expanded[:2]).all()
    assert (true.handed_on[1] - slots.handed_on[1]).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("name", "topk", "num_steps", "view"),
    spread(
        (
            (name, topk, num_steps, view)
            for name in sorted(name for name in RECIPES if not (RECIPES[name].mtp_layers or RECIPES[name].frozen))
            for topk, num_steps in ((3, 5), (1, 1), (1, 4), (2, 3), (8, 2), (4, 1))
            for view in ("slot_layout", "true_tree")
        ),
        lambda row: row[0],
        lambda row: row[1:],
    ),
)
def test_all_rounds_at_once_equal_each_round_by_itself(name: str, topk: int, num_steps: int, view: View) -> None:
    """Requests of different lengths, with rounds in no order, one request without any, and one with a single row."""
    requests = [_request(name, length, seed) for seed, length in enumerate((9, 2, 30, 4))]
    head, tokens = requests[0][0], [tokens for _, tokens, _ in requests]
    lengths = [rows_behind(head, len(sequence) - 1) for sequence in tokens]
    hidden = torch.cat([hidden[:-1] for _, _, hidden in requests])
    committed = committed_side_by_side(head, tokens, hidden)
    rounds = [(2, 29), (0, 1), (2, 3), (1, 1), (0, 8), (2, 3)]
    generator = torch.Generator().manual_seed(7)
    shape = (len(rounds), num_steps - 1, topk)
    ids = torch.randint(0, head.shape.vocab_size, shape, generator=generator)
    expanded = torch.stack(
        [  # any candidates of the step's own depth
            torch.stack([torch.randperm(topk * (topk if step else 1), generator=generator)[:topk] for _ in rounds])
            + (topk + (step - 1) * topk * topk if step else 0)
            for step in range(num_steps - 1)
        ]
        or [torch.empty(len(rounds), 0, topk, dtype=torch.int64)],
        1,
    ).reshape(shape)
    together = draft_rounds(
        head, committed, lengths, [(request, rows_behind(head, last)) for request, last in rounds], ids, expanded, view
    )
    begin = 0
    for length, (_, sequence, states) in zip(lengths, requests, strict=True):
        alone, mine = committed_rows(head, sequence, states), slice(begin, begin + length)
        assert torch.allclose(committed.hidden[mine], alone.hidden, rtol=0, atol=SAME)  # a plain draft has none
        assert (committed.keys[:, mine] - alone.keys).abs().max() < SAME
        begin += length
    for number, (request, prefix) in enumerate(rounds):
        _, sequence, states = requests[request]
        alone = draft_tree(head, sequence[: prefix + 1], states, topk, num_steps, view, follow=(ids[number], expanded[number]))
        _assert_same(together, number, alone)


@pytest.mark.parametrize("view", ["true_tree", "slot_layout"])
@pytest.mark.parametrize(("topk", "num_steps"), [(1, 1), (1, 4), (2, 3), (3, 5), (4, 1)])
def test_many_rounds_choose_as_each_by_itself(topk: int, num_steps: int, view: View) -> None:
    requests = [_request("llama-tiny", length, seed) for seed, length in enumerate((9, 2, 30))]
    head, lengths = requests[0][0], [len(tokens) - 1 for _, tokens, _ in requests]
    committed = committed_side_by_side(
        head, [tokens for _, tokens, _ in requests], torch.cat([hidden[:-1] for _, _, hidden in requests])
    )
    rounds = [(2, 29), (0, 1), (2, 3), (1, 1), (0, 8)]
    together = grow_rounds(head, committed, lengths, rounds, topk, num_steps, view)
    for number, (request, prefix) in enumerate(rounds):
        _, sequence, states = requests[request]
        _assert_same(together, number, draft_tree(head, sequence[: prefix + 1], states, topk, num_steps, view))


def _assert_same(together: Growth, number: int, alone: Growth) -> None:
    for field in dataclasses.fields(Growth):
        mine, other = getattr(together, field.name)[number], getattr(alone, field.name)
        assert mine.shape == other.shape, field.name
        assert not mine.numel() or _apart(mine, other) < SAME, field.name


def test_no_round_is_no_growth() -> None:
    head, tokens, hidden = _request("llama-tiny", 5, seed=3)
    committed = committed_side_by_side(head, [tokens], hidden[:4])
    empty = torch.empty(0, 2, 3, dtype=torch.int64)
    assert draft_rounds(head, committed, [4], [], empty, empty, "true_tree").keys.shape[:3] == (0, 2, 3)


# Trees of integers, against trees drawn by hand.
# The tree of most tests, k = 2, with 6 draft tokens; node: token (candidate)
# 0: 50 / \ 1: 7 (0) 2: 9 (1) the first frontier is candidates 0, 1: they propose candidates 2, 3 and 4, 5 | \ \ 3: 4 (2) 4: 8
# (3) 5: 4 (4) the second frontier could be 4, 2


PARENTS = [-1, 0, 0, 1, 1, 2]
TOKENS = [50, 7, 9, 4, 8, 4]


def test_candidates_are_numbered_depth_by_depth_and_in_the_order_of_the_frontier() -> None:
    """k = 2: 0, 1 are the root's; 2, 3 the first expanded node's; then 6, 7 are those of candidate 4, expanded third."""
    expanded = [0, 1, 4, 2]
    assert [tree.parent_of(candidate, 2, expanded) for candidate in range(10)] == [-1, -1, 0, 0, 1, 1, 4, 4, 2, 2]
    assert count_candidates(2, 3) == 10
    assert count_candidates(1, 5) == 5
    assert count_candidates(4, 1) == 4


def test_parents_of_selected_candidates() -> None:
    assert tree.tree_parents([0, 1, 2, 3, 4], 2, [0, 1]) == PARENTS
    assert tree.tree_parents([0, 1, 4, 6, 7], 2, [0, 1, 4, 2]) == [-1, 0, 0, 2, 3, 3]


def test_a_frontier_in_another_order_gives_other_parents() -> None:
    """Candidates 6, 7 belong to the candidate that was expanded third, whatever its number."""
    assert tree.tree_parents([0, 1, 2, 4, 6], 2, [0, 1, 4, 2]) == [-1, 0, 0, 1, 2, 4]
    assert tree.tree_parents([0, 1, 2, 4, 6], 2, [0, 1, 2, 4]) == [-1, 0, 0, 1, 2, 3]


def test_a_node_without_its_parent_is_no_tree() -> None:
    with pytest.raises(ValueError, match="candidate 2 was selected, and its parent 0 was not"):
        tree.tree_parents([1, 2], 2, [0, 1])


def test_a_chain_is_a_tree() -> None:
    assert tree.tree_parents([0, 1, 2], 1, [0, 1]) == [-1, 0, 1, 2]


def test_depths() -> None:
    assert tree.depths(PARENTS) == [0, 1, 1, 2, 2, 2]
    assert tree.depths([-1]) == [0]


def test_a_node_sees_itself_and_its_ancestors() -> None:
    assert tree.ancestor_mask(PARENTS).int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 0, 1, 0, 0, 1],
    ]


def test_the_full_mask_has_the_committed_prefix_in_front() -> None:
    mask = tree.full_mask(PARENTS, 3)
    assert mask.shape == (6, 9)
    assert mask[:, :3].all()
    assert torch.equal(mask[:, 3:], tree.ancestor_mask(PARENTS))


def test_the_packed_mask_has_a_bit_for_each_node_seen() -> None:
    assert tree.packed_mask(PARENTS) == [0b1, 0b11, 0b101, 0b1011, 0b10011, 0b100101]


def test_retrieve_links_lead_to_the_first_child_and_along_siblings() -> None:
    first, sibling = tree.retrieve_links(PARENTS)
    assert first == [1, 3, 5, -1, -1, -1]
    assert sibling == [-1, 2, -1, 4, -1, -1]


def test_leaf_paths() -> None:
    assert tree.leaf_paths(PARENTS) == [[0, 1, 3], [0, 1, 4], [0, 2, 5]]


@pytest.mark.parametrize(
    ("argmax", "path"),
    [
        ({0: 1}, [0]),  # nothing is accepted
        ({0: 7, 1: 8}, [0, 1, 4]),  # not a front prefix of the nodes
        ({0: 9, 2: 4}, [0, 2, 5]),  # node 3 has the same token and another parent
        ({0: 9, 2: 8}, [0, 2]),
        ({0: 7, 1: 4, 3: 4}, [0, 1, 3]),  # a leaf: the walk is over, whatever the argmax
    ],
)
def test_the_greedy_walk(argmax: dict[int, int], path: list[int]) -> None:
    assert tree.walk_greedy(TOKENS, PARENTS, [argmax.get(node, 0) for node in range(6)]) == path


def test_a_chain_is_accepted_up_to_the_first_difference() -> None:
    chain = [-1, 0, 1, 2]
    assert tree.walk_greedy([9, 4, 5, 6], chain, [4, 5, 7, 1]) == [0, 1, 2]
    assert tree.walk_greedy([9, 4, 5, 6], chain, [4, 5, 6, 1]) == [0, 1, 2, 3]
    assert tree.walk_greedy([9, 4, 5, 6], chain, [8, 5, 6, 1]) == [0]


def test_the_path_moves_to_the_front() -> None:
    rows = torch.arange(6) * 10
    assert tree.move_to_front(rows, [0, 2, 5]).tolist()[:3] == [0, 20, 50]
    assert tree.move_to_front(rows, [0, 2, 5]).shape == (6,)


# EAGLE-2 worked by hand (arXiv 2406.16858, §4.1 expansion and §4.2 re-ranking), and against its words on paths of tokens.
# The tree, k = 2 and 3 depths; each line is a candidate: its number, its token, its probability, and so its value
# 0: A .5 = .50 its children 2: C .5 = .25 3: D .4 = .20 1: B .4 = .40 4: C .9 = .36 5: E .05 = .02
# The second frontier is 4 (.36) and 2 (.25), in this order: branch 0 goes on from B's child, and branch 1 from A's.
# 4: its children 6: D .7 = .252 7: A .2 = .072 2: its children 8: E .6 = .15 9: B .3 = .075
# Of six nodes, the root apart, five are the best: 0 (.50), 1 (.40), 4 (.36), 6 (.252), 2 (.25). In the order of their
# numbers:
# root ─┬─ 1: A ─── 3: C └─ 2: B ─── 4: C ─── 5: D


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
WORKED_PARENTS = [-1, 0, 0, 1, 2, 4]


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
    assert tree.tree_parents(SELECTED, 2, [0, 1, 4, 2]) == WORKED_PARENTS
    assert tree.depths(WORKED_PARENTS) == [0, 1, 1, 2, 2, 3]
    assert tree.ancestor_mask(WORKED_PARENTS).int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 0, 1, 0, 1, 0],
        [1, 0, 1, 0, 1, 1],
    ]
    assert tree.retrieve_links(WORKED_PARENTS) == ([1, 3, 4, -1, 5, -1], [-1, 2, -1, -1, -1, -1])


def test_leaf_paths_are_the_published_retrieve_indices_without_their_padding() -> None:
    """SafeAILab/EAGLE fills the rows of this table up with -1."""
    paths = tree.leaf_paths(WORKED_PARENTS)
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


# Drafting behind every position of a text, against drafting behind each.


EVERYWHERE_SAME = 1e-9  # float64, of logits of a few units
LENGTH = 21


@functools.cache
def _text(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    recipe = RECIPES[name]
    tokens = torch.randint(0, recipe.target.vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(5))
    return tokens, target_rows(model_pair(name).reference_target(), recipe.target, tokens).hidden


@functools.cache
def _alone(name: str, committed: int, num_steps: int) -> Chain:
    """The chain behind x[0..committed], along the text. However long the blocks are, it is this one."""
    tokens, hidden = _text(name)
    follow = [*tokens[committed + 1 : committed + num_steps + 1].tolist(), *[0] * num_steps][:num_steps]
    head = model_pair(name).reference_heads(RECIPES[name])[0]
    return draft_chain(head, tokens[: committed + 1], hidden, num_steps, drafted=follow)


@pytest.mark.parametrize(
    ("name", "block"),
    spread(
        product(sorted(name for name in RECIPES if not (RECIPES[name].mtp_layers or RECIPES[name].frozen)), [7, 1, 4, 64]),
        lambda row: row[0],
        lambda row: row[1],
    ),
)
def test_a_chain_behind_every_position_is_the_chain_behind_each(name: str, block: int) -> None:
    head, num_steps = model_pair(name).reference_heads(RECIPES[name])[0], 3
    tokens, hidden = _text(name)
    seen = []
    for first, logits in chains_everywhere(head, tokens, hidden, num_steps, block):
        for offset, ours in enumerate(logits):
            committed = first + offset
            known = min(num_steps, LENGTH - committed)
            alone = _alone(name, committed, num_steps)
            finite = alone.logits[:known].isfinite()
            assert torch.equal(finite, ours[:known].isfinite())
            assert (ours[:known] - alone.logits[:known])[finite].abs().max() < EVERYWHERE_SAME
            seen.append(committed)
    assert seen == list(range(1, LENGTH))


@pytest.mark.parametrize("block", [*long(1), 7, *long(64)])
@pytest.mark.parametrize("name", sorted(name for name in RECIPES if RECIPES[name].mtp_layers and name != "step-3.5"))
def test_layers_behind_every_position_are_the_layers_behind_each(name: str, block: int) -> None:
    recipe = RECIPES[name]
    heads = model_pair(name).reference_heads(recipe)
    tokens, hidden = _text(name)
    seen = []
    for first, logits in layers_everywhere(heads, recipe.chained, tokens, hidden, block):
        for offset, ours in enumerate(logits):
            committed = first + offset
            follow = [*tokens[committed + 1 :].tolist(), *[0] * len(heads)][: len(heads)]
            rows = range(committed)
            alone = draft_extend(
                heads, recipe.chained, tokens[: committed + 1], hidden, rows, [None] * len(heads), proposals=follow
            )
            for layer in range(min(len(heads), LENGTH - committed)):
                assert (ours[layer] - alone[layer].logits[-1]).abs().max() < EVERYWHERE_SAME
            seen.append(committed)
    assert seen == list(range(1, LENGTH))
