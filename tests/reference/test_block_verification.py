"""Block verification emits the target's distribution, exactly, and accepts no less than rejection sampling does."""

from collections import defaultdict
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagletwin.reference.block_verification import beginnings, follow_block, left_over, sample_block

from .test_sampling import LAST, Emission, P, Q, chain_emissions, chain_targets, distance

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
