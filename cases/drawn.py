"""A list of generated cases, for what runs a fixed number of them: campaigns and comparisons. Searches draw as they go."""

import warnings

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis.strategies import SearchStrategy

from eagletwin.harness.core.case import Case

from .profiles import draw_from_seeds_alone


def drawn(strategy: SearchStrategy[Case], count: int, seed: int) -> list[Case]:
    """`count` different cases, the same for the same seed."""
    draw_from_seeds_alone()
    found: list[Case] = []

    @hypothesis.seed(seed)
    @settings(
        max_examples=2 * count, phases=(Phase.generate,), database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @hypothesis.given(strategy)
    def draw(case: Case) -> None:
        if case not in found:
            found.append(case)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hypothesis.errors.HypothesisWarning)
        draw()
    # Hypothesis begins with the simplest; these are spread over all that it drew
    return found[:: max(1, len(found) // count)][:count]
