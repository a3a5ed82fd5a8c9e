"""Lists of generated cases, and Hypothesis profiles: how many cases a test draws, and from where."""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.strategies import SearchStrategy

from eagletwin.harness.core.case import Case
from eagletwin.harness.core.files import cache_folder

# Hypothesis profiles: how many cases a test draws, and from where.
#
# dev      a handful, from a database that all runs on this machine share
# ci       the same cases in every run, on any machine
# nightly  many, new in every run
# repro    only what failed before, from the database

PREFIX = "eagletwin-"


def without_explain(phases: Iterable[Phase]) -> tuple[Phase, ...]:
    """These phases but `explain`, which names lines of Python that failing cases ran: of a worker it knows none."""
    return tuple(phase for phase in phases if phase is not Phase.explain)


def draw_from_seeds_alone() -> None:
    """Make what is drawn depend on seeds alone. Hypothesis also draws numbers that it finds in the source of the modules that
    happen to be loaded from a checkout, so that the same seed gave other cases in another process.

    This is internal to Hypothesis: a warning says so where a version does not have it."""
    try:
        from hypothesis.internal.conjecture import providers
        from hypothesis.internal.constants_ast import Constants

        if providers._get_local_constants is not Constants:
            providers.CONSTANTS_CACHE.cache.clear()  # what was drawn before in this process left such numbers there
            providers._get_local_constants = Constants
    except (ImportError, AttributeError) as error:
        warnings.warn(
            f"Hypothesis {hypothesis.__version__} draws numbers that it finds in source files in a way that eagletwin does not "
            f"know ({error}): the same seed may draw other cases in another process. Hypothesis 6.135 to 6.170 are known.",
            stacklevel=2,
        )


def register() -> None:
    """Make the profiles known to Hypothesis, as eagletwin-dev and so on. None is loaded."""
    database = DirectoryBasedExampleDatabase(cache_folder("examples"))
    # a case takes some 0.1 s and now and then an engine must be built; neither says anything about a test
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
    common = settings(
        deadline=None,
        suppress_health_check=quiet,
        print_blob=False,
        report_multiple_bugs=False,
        phases=without_explain(tuple(Phase)),
    )
    settings.register_profile(PREFIX + "dev", common, max_examples=25, database=database)
    settings.register_profile(PREFIX + "ci", common, max_examples=25, database=None, derandomize=True)
    settings.register_profile(PREFIX + "nightly", common, max_examples=1000, database=database)
    settings.register_profile(PREFIX + "repro", common, phases=(Phase.explicit, Phase.reuse), database=database)


# A list of generated cases. One of it can be made smaller later: Hypothesis draws the same list again, and shrinks from there.

_OF = 4  # of so many drawings one at least is expected to fit: of requests that may ask for much, many ask for something less


class _Enough(BaseException):
    """Leaves Hypothesis. Not an Exception, so that it is not taken for a failing test."""


def find_cases(strategy: SearchStrategy[Case], count: int, seed: int, fits: Callable[[Case], bool]) -> list[Case]:
    """The first `count` different cases that fit, of those that `shrink` with this count and seed draws again."""
    found: list[Case] = []

    @hypothesis.seed(seed)
    @settings_of_draws(_OF * count, Phase.generate)
    @hypothesis.given(strategy)
    def draw(case: Case) -> None:
        if fits(case) and case not in found:
            found.append(case)
            if len(found) == count:
                raise _Enough

    with from_the_seed_alone(), contextlib.suppress(_Enough):
        draw()
    return found


class _Shown(Exception):
    """The case shows it."""


def shrink(
    strategy: SearchStrategy[Case], count: int, seed: int, begins: Callable[[Case], bool], shows: Callable[[Case], bool]
) -> None:
    """Draw again what `find_cases` draws with this count and seed, up to the case with which it `begins`, which shows
    something, and ask of smaller cases whether each `shows` it too.

    To end it early, `shows` raises a BaseException: Hypothesis takes an Exception for a case that shows it.
    """
    begun = False

    @hypothesis.seed(seed)
    @settings_of_draws(_OF * count, Phase.generate, Phase.shrink)
    @hypothesis.given(strategy)
    def look(case: Case) -> None:
        nonlocal begun
        shown = begins(case) or (begun and shows(case))  # the first counts without being asked for again
        begun = begun or shown
        if shown:
            raise _Shown  # in one place: Hypothesis tells failures apart by where they were raised

    with from_the_seed_alone(), contextlib.suppress(_Shown):
        look()


def settings_of_draws(examples: int, *phases: Phase) -> settings:
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
def from_the_seed_alone() -> Iterator[None]:
    draw_from_seeds_alone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hypothesis.errors.HypothesisWarning)
        yield
