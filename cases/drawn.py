"""A list of generated cases, for what runs a fixed number of them: campaigns. Searches draw as they go.

One of the list can be made smaller later: Hypothesis draws the same list again, and shrinks from there.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis.strategies import SearchStrategy

from eagletwin.harness.core.case import Case

from .profiles import draw_from_seeds_alone

_OF = 4  # of so many drawings one at least is expected to fit: of requests that may ask for much, many ask for something less


def drawn(strategy: SearchStrategy[Case], count: int, seed: int) -> list[Case]:
    """`count` different cases, the same for the same seed."""
    found: list[Case] = []

    @hypothesis.seed(seed)
    @_settings(2 * count, Phase.generate)
    @hypothesis.given(strategy)
    def draw(case: Case) -> None:
        if case not in found:
            found.append(case)

    with _from_the_seed_alone():
        draw()
    # Hypothesis begins with the simplest; these are spread over all that it drew
    return found[:: max(1, len(found) // count)][:count]


class _Enough(BaseException):
    """Leaves Hypothesis. Not an Exception, so that it is not taken for a failing test."""


def few(strategy: SearchStrategy[Case], count: int, seed: int, fits: Callable[[Case], bool]) -> list[Case]:
    """The first `count` different cases that fit, of those that `shrink` with this count and seed draws again."""
    found: list[Case] = []

    @hypothesis.seed(seed)
    @_settings(_OF * count, Phase.generate)
    @hypothesis.given(strategy)
    def draw(case: Case) -> None:
        if fits(case) and case not in found:
            found.append(case)
            if len(found) == count:
                raise _Enough

    with _from_the_seed_alone(), contextlib.suppress(_Enough):
        draw()
    return found


class _Shown(Exception):
    """The case shows it."""


def shrink(
    strategy: SearchStrategy[Case], count: int, seed: int, begins: Callable[[Case], bool], shows: Callable[[Case], bool]
) -> None:
    """Draw again what `few` draws with this count and seed, up to the case with which it `begins`, which shows something, and
    ask of smaller cases whether each `shows` it too.

    To end it early, `shows` raises a BaseException: Hypothesis takes an Exception for a case that shows it.
    """
    begun = False

    @hypothesis.seed(seed)
    @_settings(_OF * count, Phase.generate, Phase.shrink)
    @hypothesis.given(strategy)
    def look(case: Case) -> None:
        nonlocal begun
        shown = begins(case) or (begun and shows(case))  # the first counts without being asked for again
        begun = begun or shown
        if shown:
            raise _Shown  # in one place: Hypothesis tells failures apart by where they were raised

    with _from_the_seed_alone(), contextlib.suppress(_Shown):
        look()


def _settings(examples: int, *phases: Phase) -> settings:
    return settings(
        max_examples=examples,
        phases=phases,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )


@contextlib.contextmanager
def _from_the_seed_alone() -> Iterator[None]:
    draw_from_seeds_alone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hypothesis.errors.HypothesisWarning)
        yield
