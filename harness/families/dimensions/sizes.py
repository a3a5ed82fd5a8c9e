"""What SGLang's engine is built with: its context, its pool, how many requests run, and weights that are updated."""

from collections.abc import Iterator

from eagletwin.harness.core.case import Case, expand_samples
from eagletwin.harness.families import RECIPES, family_of

from .dimension import Refusal, of_settings, round_slots, with_settings


def _room(case: Case) -> int:
    """Slots with which no request ever waits for another's: what SGLang sets aside for each, in whole pages."""
    requests, beside = expand_samples(case).requests, 2 * round_slots(case) + 2 * case.page_size
    total = sum(len(request.prompt) + request.max_new_tokens + beside for request in requests)
    return -(-max(total, 64) // case.page_size) * case.page_size


def _refusals(case: Case) -> Iterator[Refusal]:
    if case.engine.sglang.update_weights and not family_of(RECIPES[case.model]).one_checkpoint:
        yield (
            f"update_weights with {case.model}: eagletwin has no second checkpoint of it, for both together",
            f"use one of {', '.join(name for name, one in RECIPES.items() if family_of(one).one_checkpoint)}",
        )


UPDATES = of_settings(
    "update_weights", "weight update", key="updates", modes={"pp": "not driven", "dp": "not tried"}, refusals=_refusals
)
BATCH = of_settings(
    "max_running_requests",
    "batch limit",
    has=lambda case: case.engine.sglang.max_running_requests < len(expand_samples(case).requests),
    plain="as many as there are requests",
    without=lambda case: iter([with_settings(case, max_running_requests=len(expand_samples(case).requests))]),
)
CONTEXT = of_settings("context_length", "short context", key="context-end", kind=True, plain="the recipe's")
POOL = of_settings(
    "max_total_tokens",
    "small pool",
    has=lambda case: case.engine.sglang.max_total_tokens < _room(case),
    plain="room for all requests at once",
    without=lambda case: iter([with_settings(case, max_total_tokens=_room(case))]),
)
DIMENSIONS = (UPDATES, BATCH, CONTEXT, POOL)
