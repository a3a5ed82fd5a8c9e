"""Requests that come back: each of a drawn case may be asked again, later, with some tokens more (strategies.py draws it).

What a prefix cache had to give up meanwhile comes back from the host, where the case has a hierarchical cache. Simplest comes
first: a case shrinks to one in which nothing comes back.
"""

from hypothesis import strategies as st
from msgspec.structs import replace

from eagletwin.harness.core.case import Case, EngineSettings, Request
from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.valid import admits

from .tokens import tokens

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
