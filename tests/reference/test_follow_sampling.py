"""Following an engine's sampled tokens: what it can have decided passes, what it cannot is named, and ties are counted."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagletwin.reference.cuts import possible_targets, softmax_error
from eagletwin.reference.follow_sampling import Draws, Followed, Illegal, Walk, follow_chain, follow_tree
from eagletwin.reference.sampling import sample_chain, sample_tree, target_distribution

V = 6
PARENTS, TOKENS = (-1, 0, 0, 1, 1), (5, 0, 2, 1, 3)
COIN = st.integers(0, 2**24 - 1).map(lambda coin: coin / 2**24)


def some_logits(seed: int, count: int, spread: float = 1.5) -> Tensor:
    """Logits [count, V]."""
    return torch.randn(count, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * spread


def alone(targets: Tensor) -> list[list[Tensor]]:
    return [[row] for row in targets]


def tree(
    targets: Tensor, coins: Sequence[float], final: float, path: Sequence[int], bonus: int, error: float = 0.0
) -> Followed:
    return follow_tree(alone(targets), TOKENS, PARENTS, Draws(coins, final), Walk(path, bonus), [error] * len(TOKENS))


@settings(deadline=None)
@given(seed=st.integers(0, 10**6), coins=st.tuples(*[COIN] * 5), final=COIN, top_k=st.sampled_from([1, 2, 3, 1 << 30]))
def test_in_a_tree_exactly_what_is_sampled_is_possible(seed: int, coins: tuple[float, ...], final: float, top_k: int) -> None:
    targets = target_distribution(some_logits(seed, 5), 1.0, top_k, 1.0)
    found = sample_tree(targets, TOKENS, PARENTS, coins, final)
    bonus, close = found.emitted[-1], min(made.margin for made in found.decisions) < 1e-12
    assert tree(targets, coins, final, found.path, bonus, 1e-15).illegal is None
    for path in ([0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4]):
        for other in range(V):
            same = tuple(path) == found.path and other == bonus
            assert same or close or tree(targets, coins, final, path, other, 1e-15).illegal is not None


@pytest.mark.parametrize(
    ("coin", "path", "bonus", "why"),
    [
        (0.2, (0, 1), 1, ""),
        (0.4, (0,), 1, ""),
        (0.4, (0, 2), 1, "an elder sibling of this token was refused"),
        (0.4, (0,), 0, "nothing of this token is left to draw"),
        (0.2, (0, 2), 1, "the coin accepts this child"),
    ],
)
def test_siblings_of_one_token_have_its_probability_once(coin: float, path: tuple[int, ...], bonus: int, why: str) -> None:
    targets = torch.tensor([[0.25, 0.75], [0.5, 0.5], [0.5, 0.5]], dtype=torch.float64)
    followed = follow_tree(alone(targets), (5, 0, 0), (-1, 0, 0), Draws([coin] * 3, 0.6), Walk(path, bonus), [1e-15] * 3)
    assert (followed.illegal.why if followed.illegal else "") == why


@settings(deadline=None)
@given(seed=st.integers(0, 10**6), coins=st.tuples(COIN, COIN), final=COIN, drafted=st.tuples(*[st.integers(0, V - 1)] * 2))
def test_in_a_chain_exactly_what_is_sampled_is_possible(
    seed: int, coins: tuple[float, float], final: float, drafted: tuple[int, int]
) -> None:
    targets, drafts = some_logits(seed, 3).softmax(-1), some_logits(seed + 1, 2).softmax(-1)
    tokens = (5, *drafted)
    found = sample_chain(targets, drafts, tokens, coins, final)
    close = min(made.margin for made in found.decisions) < 1e-12
    for path in ([0], [0, 1], [0, 1, 2]):
        for bonus in range(V):
            followed = follow_chain(
                alone(targets), drafts, tokens, Draws(coins, final), Walk(path, bonus), [1e-15] * 3, [0.0] * 2
            )
            same = tuple(path) == found.path and bonus == found.emitted[-1]
            assert close or (followed.illegal is None) == same


@settings(deadline=None)
@given(seed=st.integers(0, 10**6), coins=st.tuples(*[COIN] * 5), final=COIN, temperature=st.sampled_from([0.5, 1.0, 2.0]))
def test_logits_that_are_off_within_their_bound_are_never_illegal(
    seed: int, coins: tuple[float, ...], final: float, temperature: float
) -> None:
    """An engine whose logits are off by 0.01, and top_k and top_p that cut close by; all is decided in float32."""
    logits, top_k, top_p, off = some_logits(seed, 5, 0.05), 4, 0.7, 0.01
    noise = torch.rand(logits.shape, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64) * 2 - 1
    engine = target_distribution((logits + off * noise).float(), temperature, top_k, top_p)
    found = sample_tree(engine, TOKENS, PARENTS, coins, final)
    possible = [possible_targets(row, temperature, top_k, top_p, off) for row in logits]
    errors = [softmax_error(off, temperature, V)] * 5
    followed = follow_tree(possible, TOKENS, PARENTS, Draws(coins, final), Walk(found.path, found.emitted[-1]), errors)
    assert followed.illegal is None
    assert followed.decisions == len(found.decisions)


def test_a_decision_within_its_error_is_adopted_and_counted() -> None:
    targets = torch.tensor([[0.25, 0.25, 0.25, 0.25, 0, 0]] * 5, dtype=torch.float64)
    coins, final = (0.2501, 0.9, 0.9, 0.9, 0.9), 0.6
    right = tree(targets, coins, final, [0, 2], 2)
    assert (right.illegal, right.decisions, right.ties) == (None, 3, 0)
    adopted = tree(targets, (0.2501, 0.6, 0.9, 0.9, 0.9), final, [0, 1], 2, 0.001)
    assert (adopted.illegal, adopted.decisions, adopted.ties) == (None, 4, 1)


def test_what_is_illegal_is_named() -> None:
    targets = torch.tensor([[0.25, 0.25, 0.25, 0.25, 0, 0]] * 5, dtype=torch.float64)
    coins = (0.3, 0.9, 0.9, 0.9, 0.9)

    def illegal(path: Sequence[int], bonus: int, final: float = 0.6) -> Illegal:
        found = tree(targets, coins, final, path, bonus, 0.01).illegal
        assert found is not None
        return found

    wrong = illegal([0, 1], 2)
    assert (wrong.node, wrong.token, wrong.kind, wrong.why) == (0, 0, "accept", "the coin refuses this token")
    assert wrong.by == pytest.approx(0.04)
    wrong = illegal([0], 1)
    assert (wrong.node, wrong.token, wrong.kind, wrong.why) == (0, 2, "refuse", "the coin accepts this child")
    wrong = illegal([0, 2], 0)
    assert (wrong.node, wrong.token, wrong.kind, wrong.why) == (2, 0, "bonus", "the coin draws another token")
    assert illegal([0, 2], 4).why == "the target never draws this token"
    found = tree(targets, (0.8, 0.9, 0.9, 0.9, 0.9), 0.1, [0], 0, 0.5).illegal
    assert found is not None
    assert found.why == "nothing of this token is left to draw"


def test_a_token_without_probability_is_never_adopted() -> None:
    """SGLang accepts with coin <= sum: a first child of probability 0 at a coin of exactly 0."""
    targets = torch.tensor([[0, 1.0, 0, 0, 0, 0]] * 5, dtype=torch.float64)
    found = tree(targets, (0.0,) * 5, 0.0, [0, 1], 1, 1e-6).illegal
    assert found is not None
    assert (found.node, found.token, found.kind, found.why) == (0, 0, "accept", "the target never draws this token")


def test_a_coin_that_is_no_number_allows_nothing() -> None:
    targets, none = target_distribution(some_logits(3, 5), 1.0, V, 1.0), float("nan")
    for coins, final, path in (([none] * 5, 0.5, [0]), ([0.0] * 5, none, [0, 1, 3]), ([none] * 5, 0.5, [0, 1])):
        assert tree(targets, coins, final, path, 4, 1e-9).illegal is not None


def test_a_path_that_is_none_is_refused() -> None:
    targets = some_logits(1, 5).softmax(-1)
    with pytest.raises(ValueError, match="no child"):
        tree(targets, (0.5,) * 5, 0.5, [0, 3], 1)
    with pytest.raises(ValueError, match="begins at node 0"):
        tree(targets, (0.5,) * 5, 0.5, [1, 3], 1)
    with pytest.raises(ValueError, match="a chain's path"):
        follow_chain(alone(targets[:3]), targets[:2], (5, 1, 2), Draws((0.5, 0.5), 0.5), Walk([0, 2], 1), [0.0] * 3, [0.0] * 2)


def test_cuts_in_doubt_give_several_rows() -> None:
    logits = torch.tensor([3.0, 2.0, 2.0 + 1e-7, 1.0], dtype=torch.float64)

    def kept(top_k: int, top_p: float) -> list[list[int]]:
        found = possible_targets(logits, 1.0, top_k, top_p, 1e-6)
        assert all(float(row.sum()) == pytest.approx(1, abs=1e-12) for row in found)
        return [[int(place) for place in row.nonzero()] for row in found]

    assert kept(1, 1.0) == [[0]]
    assert kept(2, 1.0) == [[0, 2], [0, 1], [0, 1, 2]]
    assert kept(1 << 30, 1.0) == [[0, 1, 2, 3]]
    two = float(logits.softmax(-1)[[0, 2]].sum())
    assert kept(1 << 30, two) == [[0, 2], [0, 1], [0, 1, 2]]
    assert kept(1 << 30, two - 0.1) == [[0, 2], [0, 1], [0, 1, 2]]
    assert kept(1 << 30, 0.5) == [[0]]


def test_cuts_through_a_plateau_cannot_be_told() -> None:
    with pytest.raises(ValueError, match="tie at a cut"):
        possible_targets(torch.zeros(20), 1.0, 5, 1.0, 1e-6)


def test_the_error_of_a_softmax_is_a_bound() -> None:
    generator = torch.Generator().manual_seed(5)
    for temperature in (0.3, 1.0, 2.0):
        for off in (1e-6, 1e-3, 0.1):
            logits = torch.randn(200, 96, generator=generator, dtype=torch.float64) * 3
            sign = torch.randn(200, 96, generator=generator, dtype=torch.float64).sign()
            there = ((logits + off * sign).float() / temperature).softmax(-1)
            here = (logits / temperature).softmax(-1)
            worst = (there.double() - here).clamp(min=0).sum(-1).max()  # of any sum: the positive ones together
            assert float(worst) <= softmax_error(off, temperature, 96) + 2**-20
            assert softmax_error(off, temperature, 96) <= 2 * off / temperature + 1e-4 or off == 0.1
