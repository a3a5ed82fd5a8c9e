"""Speculative sampling emits what the target alone would, block verification accepts no less, and tokens are followed."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from math import lcm, log

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagletwin.reference.block_verification import beginnings, follow_block, left_over, sample_block
from eagletwin.reference.cuts import targets_of_float32
from eagletwin.reference.follow_sampling import Draws, Followed, Illegal, Walk, follow_chain, follow_tree
from eagletwin.reference.hashes import gumbel_noise, murmur3, seeded_coins
from eagletwin.reference.sampling import (
    EXACT,
    Sampled,
    Thresholds,
    acceptance,
    draw,
    sample_chain,
    sample_tree,
    target_distribution,
)

# Speculative sampling emits what the target alone would: shown exactly, by integration over all coins, on tiny vocabularies.
# The outcome of a round is piecewise constant in its coins. If probabilities are multiples of 1/unit, so are the boundaries
# of the coins that accept, and a final coin's are multiples of 1/n for some n <= unit. So the mean over the midpoints of a
# grid of lcm(1..unit) cells is the integral, and no midpoint lies on a boundary.


UNIT = 4
ALL = 1 << 30  # SGLang's top_k for "all"


def rows(*counts: Sequence[int]) -> Tensor:
    """Distributions [.., V] in units of 1 / UNIT."""
    table = torch.tensor(counts, dtype=torch.float64) / UNIT
    assert bool((table.sum(-1) == 1).all())
    return table


def midpoints(cells: int) -> list[float]:
    return [(cell + 0.5) / cells for cell in range(cells)]


FINAL = midpoints(lcm(*range(1, UNIT + 1)))

Emission = tuple[int, ...]


def mean_over(outcomes: Iterator[tuple[Sampled, float]]) -> dict[Emission, float]:
    """Probability of each emission; the second of an outcome is its weight."""
    found: dict[Emission, float] = defaultdict(float)
    for sampled, weight in outcomes:
        found[sampled.emitted] += weight
    assert sum(found.values()) == pytest.approx(1, abs=1e-12)
    return found


def distance(emissions: dict[Emission, float], targets: dict[Emission, Tensor]) -> float:
    """Largest difference between how the emissions go on after a prefix, wherever they do, and the target [V] after it."""
    largest = 0.0
    for prefix, target in targets.items():
        follow = torch.zeros_like(target)
        for emission, chance in emissions.items():
            if emission[: len(prefix)] == prefix and len(emission) > len(prefix):
                follow[emission[len(prefix)]] += chance
        if float(follow.sum()) > 0:
            largest = max(largest, float((follow / follow.sum() - target).abs().max()))
    return largest


# A tree of two depths: the root has children 1 and 2, of tokens 0 and 2; node 1 has children 3 and 4.
PARENTS, TOKENS = (-1, 0, 0, 1, 1), (9, 0, 2, 1, 3)
TARGETS = rows((1, 1, 2, 0), (0, 2, 1, 1), (1, 0, 1, 2), (4, 0, 0, 0), (1, 1, 1, 1))
AFTER = {(): TARGETS[0], (0,): TARGETS[1], (2,): TARGETS[2], (0, 1): TARGETS[3], (0, 3): TARGETS[4]}


def tree_emissions(thresholds: Thresholds = EXACT) -> dict[Emission, float]:
    cells, finals = midpoints(UNIT), FINAL

    def outcomes() -> Iterator[tuple[Sampled, float]]:
        for root, child, final in product(cells, cells, finals):
            coins = (root, child, 0.9, 0.9, 0.9)  # leaves have nothing to decide
            yield sample_tree(TARGETS, TOKENS, PARENTS, coins, final, thresholds), 1 / (len(cells) ** 2 * len(finals))

    return mean_over(outcomes())


def test_a_tree_emits_the_targets_distribution() -> None:
    assert distance(tree_emissions(), AFTER) < 1e-12


@pytest.mark.parametrize("tokens", [(9, 0, 0), (9, 2, 0, 2), (9, 1, 1, 1, 1), (9, 3, 3)])
def test_a_tree_whose_siblings_have_the_same_token_does_so_too(tokens: tuple[int, ...]) -> None:
    parents, leaf = (-1, *[0] * (len(tokens) - 1)), rows((0, 1, 3, 0))[0]
    targets = torch.stack([TARGETS[0], *[leaf] * (len(tokens) - 1)])

    def outcomes() -> Iterator[tuple[Sampled, float]]:
        for coin, final in product(midpoints(UNIT), FINAL):
            yield sample_tree(targets, tokens, parents, [coin] * len(tokens), final), 1 / (UNIT * len(FINAL))

    assert distance(mean_over(outcomes()), {(): TARGETS[0]} | {(token,): leaf for token in tokens[1:]}) < 1e-12


@pytest.mark.parametrize(
    ("thresholds", "by"), [(Thresholds(single=0.5), 0.5), (Thresholds(acc=0.5), 0.5), (Thresholds(single=0.25), 0.75)]
)
def test_with_other_thresholds_it_does_not(thresholds: Thresholds, by: float) -> None:
    """By that much in the probability of a token: one of 0.5, or of 0.25, is then accepted whatever the coin."""
    assert distance(tree_emissions(thresholds), AFTER) == pytest.approx(by, abs=1e-12)


# A chain of two drafts over three tokens. What is drafted second depends on what was first, as do the target's rows.
P = {(): rows((1, 2, 1))[0], (0,): rows((0, 1, 3))[0], (1,): rows((2, 1, 1))[0], (2,): rows((4, 0, 0))[0]}
Q = {(): rows((2, 1, 1))[0], (0,): rows((1, 1, 2))[0], (1,): rows((2, 1, 1))[0], (2,): rows((1, 0, 3))[0]}
LAST = rows((1, 1, 2), (3, 1, 0), (0, 4, 0))


def chain_emissions(drawn_from: dict[Emission, Tensor] = Q) -> dict[Emission, float]:
    """drawn_from: what drafts are drawn from; verified with Q."""
    cells = midpoints(lcm(*range(1, UNIT + 1)))  # coin * q < p: boundaries at p / q

    def outcomes() -> Iterator[tuple[Sampled, float]]:
        for first, second in product(range(3), repeat=2):
            drafted = float(drawn_from[()][first] * drawn_from[(first,)][second])
            if drafted == 0:
                continue
            targets, drafts = torch.stack([P[()], P[(first,)], LAST[second]]), torch.stack([Q[()], Q[(first,)]])
            for *coins, final in product(cells, cells, FINAL):
                weight = drafted / (len(cells) ** 2 * len(FINAL))
                yield sample_chain(targets, drafts, (9, first, second), coins, final), weight

    return mean_over(outcomes())


def chain_targets() -> dict[Emission, Tensor]:
    return P | {(first, second): LAST[second] for first in range(3) for second in range(3)}


def test_a_chain_emits_the_targets_distribution() -> None:
    assert distance(chain_emissions(), chain_targets()) < 1e-12


def test_a_chain_drawn_from_another_distribution_than_it_is_verified_with_does_not() -> None:
    """As it would be if the drafts were drawn at one temperature, and q kept of another."""
    other = Q | {(): rows((0, 2, 2))[0]}
    assert distance(chain_emissions(other), chain_targets()) > 0.1


def test_margins_are_what_it_takes_to_decide_otherwise() -> None:
    """Moving the coin by less leaves the outcome as it is; by more changes it."""
    coins, final = (0.2, 0.7, 0.9, 0.9, 0.9), 0.3
    found = sample_tree(TARGETS, TOKENS, PARENTS, coins, final)
    assert found.path == (0, 1, 4)
    assert [(made.node, made.token, made.kind) for made in found.decisions] == [
        (0, 0, "accept"),
        (1, 1, "refuse"),
        (1, 3, "accept"),
        (4, 1, "bonus"),
    ]
    assert [made.margin for made in found.decisions] == pytest.approx([0.05, 0.2, 0.05, 0.05])
    for by, same in ((0.049, True), (0.051, False)):
        assert (sample_tree(TARGETS, TOKENS, PARENTS, (0.2 + by, *coins[1:]), final).path == found.path) == same
        assert (sample_tree(TARGETS, TOKENS, PARENTS, coins, final - by).emitted == found.emitted) == same


def test_a_coin_of_zero_accepts_nothing_that_is_impossible() -> None:
    targets = rows((0, 4, 0, 0), (4, 0, 0, 0))
    assert sample_tree(targets, (9, 0), (-1, 0), (0.0, 0.0), 0.0).emitted == (1,)
    assert sample_chain(targets, rows((4, 0, 0, 0)), (9, 0), (0.0,), 0.0).emitted == (1,)


def test_a_draft_that_is_no_number_is_refused_and_leaves_the_target() -> None:
    targets, nan = rows((1, 1, 2), (4, 0, 0)), torch.full((1, 3), float("nan"))
    emitted = [sample_chain(targets, nan, (9, 2), (0.0,), final).emitted for final in midpoints(UNIT)]
    assert emitted == [(0,), (1,), (2,), (2,)]


def test_the_cuts_keep_what_ties_with_the_last_one_kept() -> None:
    logits = torch.tensor([3.0, 2.0, 2.0, 1.0], dtype=torch.float64)

    def kept(top_k: int, top_p: float) -> list[int]:
        return [int(place) for place in target_distribution(logits, 1.0, top_k, top_p).nonzero()]

    assert [kept(top_k, 1.0) for top_k in (1, 2, 3, 4, ALL)] == [[0], [0, 1, 2], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3]]
    first = float(logits.softmax(-1)[0])
    assert [kept(ALL, top_p) for top_p in (1e-9, first - 1e-9, first + 1e-9, 0.999, 1.0)] == [
        [0],
        [0],
        [0, 1, 2],
        [0, 1, 2, 3],
        [0, 1, 2, 3],
    ]
    assert kept(3, 0.95) == [0, 1, 2], "of what top_k left, normalised"


def test_a_distribution_is_made_row_by_row() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [0.0, 1.0, 2.0], [0.0, 1.0, 2.0]], dtype=torch.float64)
    temperature, top_k, top_p = torch.tensor([1.0, 0.5, 2.0]), torch.tensor([1, ALL, 2]), torch.tensor([1.0, 1.0, 0.7])
    found = target_distribution(logits, temperature, top_k, top_p)
    assert found[0].tolist() == [0, 0, 1]
    assert torch.allclose(found[1], torch.softmax(logits[1] * 2, -1))
    assert found[2, 0] == 0
    assert torch.allclose(found[2, 1:], torch.softmax(logits[2, 1:] / 2, -1)), "two are needed for 0.7"


def test_a_threshold_and_the_sum_accept_each_on_its_own() -> None:
    assert acceptance(0.3, 0.3, 0.9, Thresholds(single=0.25)) == pytest.approx(0.05)
    assert acceptance(0.1, 0.3, 0.5, Thresholds(acc=0.5)) == pytest.approx(0.05)
    assert acceptance(0.1, 0.3, 0.5) == pytest.approx(-0.2)


def test_nothing_can_be_drawn_from_nothing() -> None:
    with pytest.raises(ValueError, match="nothing to draw from"):
        draw(torch.zeros(3), 0.5)


# Block verification emits the target's distribution, exactly, and accepts no less than rejection sampling does.


V, STEPS = 3, 2
COIN = st.integers(0, 2**24 - 1).map(lambda coin: coin / 2**24)


def exact_emissions() -> dict[Emission, float]:
    """n drafts are the longest beginning that is accepted with h[n] times the product of 1 - h of the longer ones; the bonus
    token then has its share of what is left: coins are integrated by hand."""
    found: dict[Emission, float] = defaultdict(float)
    for first, second in product(range(V), repeat=STEPS):
        drafted = float(Q[()][first] * Q[(first,)][second])
        if drafted == 0:
            continue
        targets, drafts = torch.stack([P[()], P[(first,)], LAST[second]]), torch.stack([Q[()], Q[(first,)]])
        of, remaining = beginnings(targets, drafts, (9, first, second)), drafted
        for n in range(STEPS, -1, -1):
            chance = remaining * (of[n].accepted if n else 1)
            remaining -= chance
            if chance == 0:
                continue
            rest = targets[n] if n == STEPS else left_over(of[n].ratio, targets[n], drafts[n])
            for token in range(V):
                found[(*(first, second)[:n], token)] += chance * float(rest[token] / rest.sum())
    assert sum(found.values()) == pytest.approx(1, abs=1e-12)
    return found


def test_it_emits_the_targets_distribution() -> None:
    assert distance(exact_emissions(), chain_targets()) < 1e-12


def test_it_accepts_no_less_than_rejection_sampling() -> None:
    block, rejection = (
        sum(len(emission) * chance for emission, chance in emissions.items())
        for emissions in (exact_emissions(), chain_emissions())
    )
    assert block > rejection + 0.01


@settings(deadline=None)
@given(seed=st.integers(0, 10**6), coins=st.tuples(COIN, COIN, COIN), final=COIN)
def test_exactly_what_is_sampled_is_possible(seed: int, coins: tuple[float, ...], final: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randn(4, 5, generator=generator, dtype=torch.float64).softmax(-1)
    drafts = torch.randn(3, 5, generator=generator, dtype=torch.float64).softmax(-1)
    tokens = (0, *torch.multinomial(drafts, 1, generator=generator)[:, 0].tolist())
    found = sample_block(targets, drafts, tokens, coins, final)
    close = min(made.margin for made in found.decisions) < 1e-12
    for accepted, bonus in product(range(4), range(5)):
        followed = follow_block(targets, drafts, tokens, coins, final, accepted, bonus, 1e-15)
        same = accepted == len(found.path) - 1 and bonus == found.emitted[-1]
        assert close or (followed.illegal is None) == same


# Hashed coins: published values of the hash, and what a coin is. The worker's own: tests/engine/test_sampling.py.


def test_the_hash_has_the_published_values() -> None:
    """MurmurHash3_32, seed 0: of nothing, of "test", of four bytes of ones and of zeros."""
    assert murmur3([]) == 0
    assert murmur3([int.from_bytes(b"test", "little")]) == 0xBA6BD213
    assert murmur3([0xFFFFFFFF]) == 0x76293B50
    assert murmur3([0]) == 0x2362F9DE


def test_noise_draws_with_the_rows_probabilities() -> None:
    """4,000 draws of five tokens: each share is within four deviations of its probability."""
    row = torch.tensor([0.5, 0.25, 0.15, 0.1, 0.0], dtype=torch.float64)
    drawn = [int((row.log() + gumbel_noise(seed, 7, 5)).argmax()) for seed in range(4000)]
    shares = torch.bincount(torch.tensor(drawn), minlength=5) / 4000
    assert bool(((shares - row).abs() <= 4 * (row * (1 - row) / 4000).sqrt()).all()), shares


@pytest.mark.parametrize("refused", [False, True], ids=["bonus", "residual"])
def test_with_noise_exactly_what_is_drawn_is_possible(refused: bool) -> None:
    """Of what rejection leaves, or of the target's own; a token within the error of the best is a tie."""
    row, draft = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.7, 0.1, 0.2]).double()
    rest, noise = (row - draft).clamp(min=0) if refused else row, torch.tensor([0.0, 0.1, 0.2]).double()
    right = int((rest.log() + noise).argmax())
    for bonus in range(3):
        draws = Draws([0.9] if refused else [], noise=noise, relative=1e-6)
        drafts, tokens = (draft[None], [0, 0]) if refused else (draft[:0].reshape(0, 3), [0])
        followed = follow_chain([[row]] * 2, drafts, tokens, draws, Walk([0], bonus), [1e-6] * 2, [0.0])
        assert (followed.illegal is None) == (bonus == right), (bonus, followed)
    even = torch.tensor([0.0, log(0.5 / 0.3) - 1e-7, 0.0]).double()
    followed = follow_chain([[row]], drafts[:0], [0], Draws([], noise=even, relative=1e-6), Walk([0], 1), [0.0], [])
    assert (followed.illegal, followed.ties) == (None, 1)


def test_coins_depend_on_the_seed_the_length_and_the_node() -> None:
    coins = seeded_coins(7, 12, 4)
    assert len(coins) == 5
    assert all(0 <= coin < 1 for coin in coins)
    assert coins == seeded_coins(7, 12, 4)
    assert not set(coins) & set(seeded_coins(8, 12, 4)) & set(seeded_coins(7, 13, 4))
    assert coins[:3] == seeded_coins(7, 12, 2)  # column by column
    assert seeded_coins(7 + (1 << 40), 12, 4) != coins  # both halves of the seed count


# Following an engine's sampled tokens: what it can have decided passes, what it cannot is named, and ties are counted.


FOLLOW_V = 6
FOLLOW_PARENTS, FOLLOW_TOKENS = (-1, 0, 0, 1, 1), (5, 0, 2, 1, 3)
FOLLOW_COIN = st.integers(0, 2**24 - 1).map(lambda coin: coin / 2**24)


def some_logits(seed: int, count: int, spread: float = 1.5) -> Tensor:
    """Logits [count, V]."""
    return torch.randn(count, FOLLOW_V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * spread


def alone(targets: Tensor) -> list[list[Tensor]]:
    return [[row] for row in targets]


def tree(
    targets: Tensor, coins: Sequence[float], final: float, path: Sequence[int], bonus: int, error: float = 0.0
) -> Followed:
    return follow_tree(
        alone(targets), FOLLOW_TOKENS, FOLLOW_PARENTS, Draws(coins, final), Walk(path, bonus), [error] * len(FOLLOW_TOKENS)
    )


@settings(deadline=None)
@given(
    seed=st.integers(0, 10**6),
    coins=st.tuples(*[FOLLOW_COIN] * 5),
    final=FOLLOW_COIN,
    top_k=st.sampled_from([1, 2, 3, 1 << 30]),
)
def test_in_a_tree_exactly_what_is_sampled_is_possible(seed: int, coins: tuple[float, ...], final: float, top_k: int) -> None:
    targets = target_distribution(some_logits(seed, 5), 1.0, top_k, 1.0)
    found = sample_tree(targets, FOLLOW_TOKENS, FOLLOW_PARENTS, coins, final)
    bonus, close = found.emitted[-1], min(made.margin for made in found.decisions) < 1e-12
    assert tree(targets, coins, final, found.path, bonus, 1e-15).illegal is None
    for path in ([0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4]):
        for other in range(FOLLOW_V):
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
@given(
    seed=st.integers(0, 10**6),
    coins=st.tuples(FOLLOW_COIN, FOLLOW_COIN),
    final=FOLLOW_COIN,
    drafted=st.tuples(*[st.integers(0, FOLLOW_V - 1)] * 2),
)
def test_in_a_chain_exactly_what_is_sampled_is_possible(
    seed: int, coins: tuple[float, float], final: float, drafted: tuple[int, int]
) -> None:
    targets, drafts = some_logits(seed, 3).softmax(-1), some_logits(seed + 1, 2).softmax(-1)
    tokens = (5, *drafted)
    found = sample_chain(targets, drafts, tokens, coins, final)
    close = min(made.margin for made in found.decisions) < 1e-12
    for path in ([0], [0, 1], [0, 1, 2]):
        for bonus in range(FOLLOW_V):
            followed = follow_chain(
                alone(targets), drafts, tokens, Draws(coins, final), Walk(path, bonus), [1e-15] * 3, [0.0] * 2
            )
            same = tuple(path) == found.path and bonus == found.emitted[-1]
            assert close or (followed.illegal is None) == same


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
    targets, none = target_distribution(some_logits(3, 5), 1.0, FOLLOW_V, 1.0), float("nan")
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
    logits = torch.tensor([3.0, 2.0, 2.0 + 2.0**-22, 1.0])

    def kept(top_k: int, top_p: float) -> list[list[int]]:
        found = targets_of_float32(logits, 1.0, top_k, top_p)
        assert all(float(row.sum()) == pytest.approx(1, abs=1e-12) for row in found)
        return [[int(place) for place in row.nonzero()] for row in found]

    assert kept(1, 1.0) == [[0]]
    assert kept(2, 1.0) == [[0, 2], [0, 1], [0, 1, 2]]
    assert kept(1 << 30, 1.0) == [[0, 1, 2, 3]]
    two = float(logits.double().softmax(-1)[[0, 2]].sum())
    assert sorted(kept(1 << 30, two)) == [[0, 1], [0, 1, 2], [0, 2]]
    assert kept(1 << 30, two - 0.1) == [[0, 2], [0, 1], [0, 1, 2]]
    assert kept(1 << 30, 0.5) == [[0]]


def test_cuts_through_a_plateau_cannot_be_told() -> None:
    with pytest.raises(ValueError, match="tie at a cut"):
        targets_of_float32(1 + torch.arange(20) * 2.0**-23, 1.0, 5, 1.0)
