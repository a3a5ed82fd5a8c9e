"""The requests of a case: how many there are, when they come, how long they are, and which tokens end them."""

from collections.abc import Iterator

from msgspec.structs import replace

from eagletwin.harness.core.case import Case, Request, most_before, sent_for
from eagletwin.harness.families import RECIPES

from .dimension import Dimension, Refusal, of_requests, round_slots, with_events


def _single(case: Case) -> Iterator[Case]:
    for request in case.requests:
        names = ("", *(sent.id for sent in sent_for(request)))
        kept = with_events(case, lambda event: event.request in names)  # noqa: B023
        yield replace(kept, requests=(replace(request, after=""),))


def _refusals(case: Case) -> Iterator[Refusal]:
    ids = [request.id for request in case.requests]
    if len(set(ids)) < len(ids):
        yield "two requests have the same id", "give each request an id of its own"
    for request in case.requests:
        yield from ((f"request {request.id!r}: {cause}", remedy) for cause, remedy in _sizes(case, request))


def _sizes(case: Case, request: Request) -> Iterator[Refusal]:
    settings, recipe = case.engine.sglang, RECIPES[case.model]
    outside = [
        one for one in (*request.prompt, *(bias.token for bias in request.logit_bias)) if one >= recipe.target.vocab_size
    ]
    if outside:
        yield (
            f"token {outside[0]} is outside the vocabulary of {case.model}",
            f"use ids from 0 to {recipe.target.vocab_size - 1}",
        )
    # SGLang reserves room for two rounds ahead, in whole pages, before it lets a request run
    prompt = most_before(case, request.id) + len(request.prompt)
    length = prompt + request.max_new_tokens
    need = length + 2 * round_slots(case) + 2 * case.page_size
    if need > settings.max_total_tokens:
        yield (
            f"needs up to {need} slots, and the pool has {settings.max_total_tokens}",
            "shorten the request or raise engine.sglang.max_total_tokens",
        )
    # what SGLang admits without cutting it down
    context = settings.context_length or recipe.max_position
    if prompt > context - 7 or length > context - 2:
        yield (
            f"a prompt of {prompt} and {length} tokens in all, in a context of {context}",
            f"keep to {context - 7} and {context - 2}",
        )


def _after_refusals(case: Case) -> Iterator[Refusal]:
    """A request comes after an earlier one of the list, so that none waits for itself."""
    for number, request in enumerate(case.requests):
        if not request.after:
            continue
        where = f"request {request.id!r} comes after {request.after!r}"
        if request.after not in [other.id for other in case.requests[:number]]:
            yield f"{where}, which is no request before it in the list: it would wait for ever", "name one that is"
        if request.session:
            yield f"{where} and is a turn of a session, which waits for the turn before", "leave one of the two out"
        if any(event.request == request.id and not event.step for event in case.events):
            yield (
                f"{where}, and is aborted: SGLang ignores an abort of a request that was not handed in yet",
                "abort it inside a step, or remove `after`",
            )


SEVERAL = Dimension(
    name="requests",
    words="several requests",
    has=lambda case: len(case.requests) > 1,
    size=lambda case: len(case.requests),
    says=lambda case: f"{len(case.requests)} requests",
    plain="one request: any of them",
    without=_single,
    refusals=_refusals,
)
ARRIVALS = of_requests("arrive", "late arrivals", size=int, plain="all arrive at the start")
AFTER = of_requests("after", "waiting requests", plain="each comes at its arrival", refusals=_after_refusals)
STOP = of_requests("stop", "stop tokens", size=len)
DIMENSIONS = (SEVERAL, ARRIVALS, AFTER, STOP)
