"""Engine configurations and cases that a plan for a GPU draws."""

from dataclasses import replace
from random import Random
from typing import Any

import hypothesis
from hypothesis import Phase
from hypothesis.strategies import SearchStrategy

from eagletwin.cases.sample_cases import from_the_seed_alone, settings_of_draws
from eagletwin.cases.strategies import MODELS, NUM_STEPS, TOPKS, TREE_SIZES, Focus, _possible
from eagletwin.harness.core.case import Case


def focus_of(seed: int, widest: int = TOPKS[-1], /, **held: Any) -> Focus:
    """One of the configurations, by a seed. Long chains, pages and the cache come more often than a fair share. Chains and
    trees take turns, so that a search of a few blocks has both.

    widest: the largest topk. held: fields that are what they are said to be, whatever the seed.
    """
    random = Random(seed)
    drawn = Focus(
        model=random.choice(MODELS),
        num_steps=random.choice(NUM_STEPS),
        topk=min(widest, random.choice(TOPKS[1:])) if seed % 2 else TOPKS[0],
        tree_size=random.choice(TREE_SIZES),
        page_size=random.choice((1, 1, 4, 4, 16)),
        radix_cache=random.random() < 0.6,
        max_total_tokens=random.choice((512, 512, 96, 128)),
        max_running_requests=random.choice((8, 8, 8, 2)),
    )
    return _possible(replace(drawn, **held), held)


def draw_cases(strategy: SearchStrategy[Case], count: int, seed: int) -> list[Case]:
    """`count` different cases, the same for the same seed."""
    found: list[Case] = []

    @hypothesis.seed(seed)
    @settings_of_draws(2 * count, Phase.generate)
    @hypothesis.given(strategy)
    def draw(case: Case) -> None:
        if case not in found:
            found.append(case)

    with from_the_seed_alone():
        draw()
    # Hypothesis begins with the simplest; these are spread over all that it drew
    return found[:: max(1, len(found) // count)][:count]
