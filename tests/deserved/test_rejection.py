"""The expectation of rejection sampling: against rounds that are drawn, and against an enumeration of all of them."""

from itertools import product

import numpy as np
import pytest
import torch

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.deserved.statistics import MOST_DEVIATIONS, Expected, chances, expected
from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.weights import model_pair
from eagletwin.reference.chain import draft_chain
from eagletwin.reference.llama import target_rows


def drawn(kept: Array, begin: int, random: np.random.Generator) -> int:
    """Rounds of one walk."""
    committed, rounds, last = begin, 0, len(kept) - 1
    while committed < last:
        drafts = 0
        while drafts < kept.shape[1] and random.random() < kept[committed, drafts]:
            drafts += 1
        committed, rounds = committed + drafts + 1, rounds + 1
    return rounds


def some_chances(size: int, steps: int, seed: int) -> Array:
    kept = np.random.default_rng(seed).random((size, steps))
    for place in range(size):
        kept[place, max(0, size - 1 - place) :] = 0  # the text has ended
    return kept


def test_mean_and_variance_are_those_of_rounds_that_are_drawn() -> None:
    kept, random = some_chances(60, 3, 1), np.random.default_rng(2)
    rounds = np.array([drawn(kept, 7, random) for _ in range(4000)])
    found = expected(kept, 7)
    assert abs(rounds.mean() - found.rounds) < 4 * (found.variance / len(rounds)) ** 0.5
    # the variance of a sample varies by sqrt(2 / n) of itself
    assert abs(rounds.var() / found.variance - 1) < 5 * (2 / len(rounds)) ** 0.5


def test_they_are_what_all_ways_to_accept_come_to() -> None:
    """A text of five tokens behind its prompt, two drafts a round: each way to accept, with its chance."""
    kept = some_chances(6, 2, 3)
    ways = dict[int, float]()

    def go(committed: int, rounds: int, chance: float) -> None:
        if committed >= 5:
            ways[rounds] = ways.get(rounds, 0.0) + chance
            return
        for accepts in {tuple(way) for way in product((True, False), repeat=2)}:
            drafts = 2 if all(accepts) else accepts.index(False)
            own = np.prod([p if yes else 1 - p for yes, p in zip(accepts, kept[committed], strict=True)])
            if own:
                go(committed + drafts + 1, rounds + 1, chance * float(own))

    go(0, 0, 1.0)
    mean = sum(rounds * chance for rounds, chance in ways.items())
    found = expected(kept, 0)
    assert sum(ways.values()) == pytest.approx(1)
    assert found.rounds == pytest.approx(mean)
    assert found.variance == pytest.approx(sum(chance * (rounds - mean) ** 2 for rounds, chance in ways.items()))


def test_what_cannot_be_otherwise_has_no_variance() -> None:
    all_kept, none = np.ones((10, 3)), np.zeros((10, 3))
    for place in range(10):
        all_kept[place, 9 - place :] = 0
    assert expected(all_kept, 1) == Expected(2.0, 0.0)
    assert expected(none, 1) == Expected(8.0, 0.0)
    assert expected(none, 1).deviations(8) == 0
    assert abs(expected(none, 1).deviations(9)) > 1000
    assert Expected(3, 1) + Expected(4, 2) == Expected(7, 3)


def test_the_smallest_loss_is_missed_in_one_of_twenty_runs() -> None:
    """Rounds of many texts are spread as a normal distribution; a server that is off so far is called wrong above the bound."""
    whole = sum((expected(some_chances(60, 3, seed), 7) for seed in range(30)), Expected(0, 0))
    rounds = whole.rounds + whole.smallest_loss + np.random.default_rng(5).normal(0, whole.variance**0.5, 20_000)
    shown = np.mean([whole.deviations(one) > MOST_DEVIATIONS for one in rounds])
    assert 0.94 < shown < 0.96


class Draft:
    """As DraftModel, of a recipe's head."""

    algorithm = "EAGLE"

    def __init__(self, model: str) -> None:
        self.heads = (model_pair(model).reference_head(RECIPES[model]),)


@pytest.mark.parametrize("model", ["llama-tiny", "llama-eagle3"])
def test_a_draft_is_kept_by_what_the_chain_at_its_place_proposes(model: str) -> None:
    """Against a chain that is drafted behind one prefix by itself, fed with the text."""
    recipe, pair = RECIPES[model], model_pair(model)
    tokens = torch.randint(0, recipe.target.vocab_size, (24,), generator=torch.Generator().manual_seed(5))
    rows = target_rows(pair.reference_target(), recipe.target, tokens)
    said = (rows.logits[:-1] / 0.7).log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    kept = chances(Draft(model), tokens.tolist(), rows.hidden, said, 3, 0.7)  # type: ignore[arg-type]
    head = pair.reference_head(recipe)
    for committed in (5, 11, 20):
        logits = draft_chain(head, tokens[: committed + 1], rows.hidden, 1).logits[0]
        own = float((logits / 0.7).log_softmax(-1)[tokens[committed + 1]] - said[committed])
        assert kept[committed, 0] == pytest.approx(min(1.0, float(np.exp(own))))
    assert (kept[-1] == 0).all()
    assert kept[-2, 1:].tolist() == [0, 0]
    assert ((kept >= 0) & (kept <= 1)).all()
    assert 0 < kept[1:-1, 0].mean() < 1
