"""Two requests that fill the pool, and need what one of them leaves there (strategies.py draws the case).

A prefix cache keeps what a request leaves, and a hierarchical one locks it until its copy to the host is done. Simplest comes
first: a case shrinks to one as it was drawn.
"""

from hypothesis import strategies as st
from msgspec.structs import replace

from eagletwin.harness.core.case import Case, Request
from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.valid import admits
from eagletwin.reference.sizes import reserved

from .tokens import tokens

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
