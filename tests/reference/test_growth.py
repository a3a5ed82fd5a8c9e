"""Draft trees: hand-worked growth, the chain as the tree of topk 1, and all rounds at once against one at a time."""

import dataclasses
import functools

import pytest
import torch
from torch import Tensor

from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.weights import model_pair
from eagletwin.reference.chain import committed_rows, draft_chain, rows_behind
from eagletwin.reference.eagle import Head
from eagletwin.reference.growth import Growth, View, best_of, candidates, draft_tree, lineage, path_sums, select
from eagletwin.reference.llama import target_rows
from eagletwin.reference.rounds import committed_side_by_side, draft_rounds, grow_rounds

from ..rows import long, spread

# Both forms do the same float64 sums in another order; rows are of size 1 to 10.
SAME = 1e-11


@functools.cache
def _request(name: str, length: int, seed: int) -> tuple[Head, Tensor, Tensor]:
    recipe, pair = RECIPES[name], model_pair(name)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, recipe.target.vocab_size, (length,), generator=generator)
    return pair.reference_head(recipe), tokens, target_rows(pair.reference_target(), recipe.target, tokens).hidden


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
