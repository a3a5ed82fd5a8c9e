"""Requests that no token may end before they were sent so many."""

from collections.abc import Iterator

from eagletwin.harness.core.case import Case, Request

from .dimension import Refusal, of_requests, st


def _refusals(_case: Case, request: Request) -> Iterator[Refusal]:
    if request.min_new_tokens > request.max_new_tokens:
        least, most = request.min_new_tokens, request.max_new_tokens
        yield f": min_new_tokens {least}, and max_new_tokens {most}", "make it at most as many"


DIMENSION = of_requests(
    "min_new_tokens",
    "min_new_tokens",
    row="before this many sent tokens, stop tokens and the end-of-sequence token are impossible | 0 to `max_new_tokens`, 0",
    key="min-new-tokens",
    size=int,
    example=1,
    draw=lambda draw, request, vocabulary: draw(st.integers(0, request.max_new_tokens)),
    refuses=_refusals,
    happened={
        "held_back": (
            "a token that ends the request was the target's best, and min_new_tokens made it impossible, where verify "
            "committed one",
            lambda run: any(map(run.held_back, run.verified)),
        )
    },
)
