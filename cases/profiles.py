"""Hypothesis profiles: how many cases a test draws, and from where.

dev      a handful, from a database that all runs on this machine share
ci       the same cases in every run, on any machine
nightly  many, new in every run
repro    only what failed before, from the database
"""

import contextlib

from hypothesis import HealthCheck, Phase, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from eagletwin.harness.paths import cache_folder

PREFIX = "eagletwin-"


def draw_from_seeds_alone() -> None:
    """Make what is drawn depend on seeds alone. Hypothesis also draws numbers that it finds in the source of the modules that
    happen to be loaded from a checkout, so that the same seed gave other cases in another process."""
    with contextlib.suppress(ImportError):  # internal to Hypothesis; where it is absent there is nothing to do
        from hypothesis.internal.conjecture import providers
        from hypothesis.internal.constants_ast import Constants

        if providers._get_local_constants is not Constants:
            providers._get_local_constants = Constants
            providers.CONSTANTS_CACHE.cache.clear()  # what was drawn before in this process left such numbers there


def register() -> None:
    """Make the profiles known to Hypothesis, as eagletwin-dev and so on. None is loaded."""
    database = DirectoryBasedExampleDatabase(cache_folder("examples"))
    # a case takes some 0.1 s and now and then an engine must be built; neither says anything about a test
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
    common = settings(deadline=None, suppress_health_check=quiet, print_blob=False, report_multiple_bugs=False)
    settings.register_profile(PREFIX + "dev", common, max_examples=25, database=database)
    settings.register_profile(PREFIX + "ci", common, max_examples=25, database=None, derandomize=True)
    settings.register_profile(PREFIX + "nightly", common, max_examples=1000, database=database)
    settings.register_profile(PREFIX + "repro", common, phases=(Phase.explicit, Phase.reuse), database=database)
