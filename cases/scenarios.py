"""Requests that meet: prefilled together, filling the pool, or coming back (strategies.py draws the case)."""

from hypothesis import strategies as st
from msgspec.structs import replace

from eagletwin.harness.core.case import Case, EngineSettings, Request
from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.dimensions.dimension import tokens
from eagletwin.harness.families.valid import admits
from eagletwin.reference.sizes import reserved

# Requests whose prompts are prefilled together, where chunks would mostly keep them apart (strategies.py draws the case).
#
# Layers that keep a state leave states of several prompts in one prefill then. Simplest comes first: a case shrinks to one as
# it was drawn.

_ONE_IN = 3


@st.composite
def together(draw: st.DrawFn, cases: st.SearchStrategy[Case]) -> Case:
    """A case; one in three with all of its requests at once, and in no chunks."""
    case = draw(cases)
    if draw(st.integers(1, _ONE_IN)) < _ONE_IN:
        return case
    gathered = replace(case, requests=tuple(replace(request, arrive=0) for request in case.requests), chunks=())
    return gathered if admits(gathered) else case


# Two requests that fill the pool, and need what one of them leaves there (strategies.py draws the case).
#
# A prefix cache keeps what a request leaves, and a hierarchical one locks it until its copy to the host is done. Simplest comes
# first: a case shrinks to one as it was drawn.

_LATER = 3  # iterations, in which the two that fill it are alone


@st.composite
def filling(draw: st.DrawFn, cases: st.SearchStrategy[Case]) -> Case:
    """Mostly a case in which the first two requests fill the pool, where rounds ask for more than a few slots: what is free is
    enough for both to be let in, and less than a round asks for. One ends at once, and what it leaves is needed while it is
    copied to the host."""
    case = draw(cases)
    fills, left, more, seed = draw(st.tuples(st.integers(0, 3), st.integers(0, 63), st.integers(0, 7), st.integers(0, 255)))
    page, asked_for = case.page_size, 2 * reserved(case.topk, case.most_steps, case.page_size, case.most_nodes)
    # for one new token of the first, two of the second, and a page of each
    least, most = 3 + 2 * page, asked_for - 2
    if not fills or len(case.requests) < 2 or least > most:
        return case
    first, second = case.requests[:2]
    free = least + left % (most - least + 1)
    # the second one is admitted where there is room for its rounds behind it, which the first one takes
    length = max(len(first.prompt), asked_for + 2 * page)
    rest = case.engine.sglang.max_total_tokens - length - free
    if rest < 1:
        return case
    pair = (
        replace(first, prompt=_of_length(case, first, length, seed), max_new_tokens=1, arrive=0),
        replace(
            second,
            prompt=_of_length(case, second, rest, seed),
            max_new_tokens=2 + more % (free - least + 1),
            arrive=0,
        ),
    )
    later = tuple(replace(request, arrive=request.arrive + _LATER) for request in case.requests[2:])
    filled = replace(case, requests=pair + later, chunks=())
    return filled if admits(filled) else case


def _of_length(case: Case, request: Request, length: int, seed: int) -> tuple[int, ...]:
    """Its prompt, cut or with more tokens."""
    more = tokens(seed, max(length - len(request.prompt), 0), RECIPES[case.model].target.vocab_size)
    return (*request.prompt, *more)[:length]


# Requests that come back: each of a drawn case may be asked again, later, with some tokens more (strategies.py draws it).
#
# What a prefix cache had to give up meanwhile comes back from the host, where the case has a hierarchical cache. Simplest comes
# first: a case shrinks to one in which nothing comes back.

_MORE = (0, 0, 1, 3, 12)  # tokens behind the prompt that is asked again


@st.composite
def returning(draw: st.DrawFn, cases: st.SearchStrategy[Case]) -> Case:
    """A case with some of its requests a second time, in their order, after the last of them has come.

    Now and then, and whenever shrinking can have it, one without the hierarchical cache.
    """
    kept = draw(st.integers(0, 63)) > 0
    case = draw(cases)
    if not kept:
        settings = replace(case.engine.sglang, host_pages=0, host_policy="write_through")
        case = replace(case, engine=EngineSettings(sglang=settings))
    arrive = max(request.arrive for request in case.requests)
    for request in case.requests:
        comes, after, more, seed = draw(
            st.tuples(st.integers(0, 7), st.integers(1, 24), st.sampled_from(_MORE), st.integers(0, 255))
        )
        if not comes:
            continue
        arrive += after
        own = tokens(seed, more, RECIPES[case.model].target.vocab_size)
        for tail in (own, ()):
            again = replace(request, id=f"{request.id}-again", prompt=request.prompt + tail, arrive=arrive)
            if (admitted := _with(case, again)) is not None:
                case = admitted
                break
    return case


def _with(case: Case, request: Request) -> Case | None:
    more = replace(case, requests=(*case.requests, request))
    return more if admits(more) else None
