"""Speculative sampling emits what the target alone would: shown exactly, by integration over all coins, on tiny vocabularies.

The outcome of a round is piecewise constant in its coins. If probabilities are multiples of 1/unit, so are the boundaries of
the coins that accept, and a final coin's are multiples of 1/n for some n <= unit. So the mean over the midpoints of a grid of
lcm(1..unit) cells is the integral, and no midpoint lies on a boundary.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from math import lcm

import pytest
import torch
from torch import Tensor

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
