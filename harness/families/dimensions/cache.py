"""The prefix cache, and the hierarchical cache, which keeps on the host what the prefix cache must give up."""

from collections.abc import Iterator

from eagletwin.harness.core.case import Case
from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.recipe import Recipe

from .dimension import Refusal, of_settings, with_settings
from .session import DIMENSION as SESSION


def keeps_on_host(recipe: Recipe) -> bool:
    """Whether a hierarchical cache of this model can be judged."""
    return not recipe.target.states and recipe.family != "step3p5" and not recipe.frozen


def _without_host(case: Case) -> Iterator[Case]:
    yield with_settings(case, host_pages=0, host_policy="write_through")


def _without_cache(case: Case) -> Iterator[Case]:
    assert SESSION.without is not None
    for apart in SESSION.without(case):
        yield from (with_settings(one, radix_cache=False) for one in _without_host(apart))


def _refusals(case: Case) -> Iterator[Refusal]:
    recipe, settings = RECIPES[case.model], case.engine.sglang
    if settings.host_pages and not settings.radix_cache:
        yield "host_pages without the prefix cache: there is nothing to keep", "set radix_cache"
    if settings.host_pages and not keeps_on_host(recipe):
        why = "SGLang switches its pool of windows off then, and cannot run it on the Triton backend"
        if recipe.target.states:
            why = "eagletwin does not follow the states of layers on the host"
        elif recipe.frozen:
            why = "eagletwin does not know yet what its draft reads then"
        yield f"host_pages with {case.model}: {why}", "use another model"


HOST = of_settings(
    "host_pages",
    "hierarchical cache",
    key="host-cache",
    kind=True,
    without=_without_host,
    refusals=_refusals,
    modes={"pp": "not driven", "dp": "not tried"},
    happened={
        "host_written": (
            "rows of the prefix cache were written to the host",
            lambda run: any(not record.numbers["restore"] for record in run.of("copy")),
        ),
        "host_evicted": (
            "rows on the host made room for others, in a case without a flush",
            lambda run: run.host_slot_given_again(),
        ),
        "host_restored": (
            "a request went on from rows that came back from the host",
            lambda run: any(record.numbers["restore"] for record in run.of("copy")),
        ),
    },
)
RADIX = of_settings("radix_cache", "prefix cache", without=_without_cache)
DIMENSIONS = (HOST, RADIX)
