"""Hypothesis profiles: how many cases a test draws, and from where.

dev      a handful, from a database that all runs on this machine share
ci       the same cases in every run, on any machine
nightly  many, new in every run
repro    only what failed before, from the database
"""

import warnings
from collections.abc import Iterable

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from eagletwin.harness.core.folders import cache_folder

PREFIX = "eagletwin-"


def unexplained(phases: Iterable[Phase]) -> tuple[Phase, ...]:
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
        phases=unexplained(tuple(Phase)),
    )
    settings.register_profile(PREFIX + "dev", common, max_examples=25, database=database)
    settings.register_profile(PREFIX + "ci", common, max_examples=25, database=None, derandomize=True)
    settings.register_profile(PREFIX + "nightly", common, max_examples=1000, database=database)
    settings.register_profile(PREFIX + "repro", common, phases=(Phase.explicit, Phase.reuse), database=database)
