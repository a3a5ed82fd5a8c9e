"""Several samples of one prompt, of requests of a drawn case (asked.py draws them after all the rest).

Simplest comes first: a case shrinks to one in which each request wants one answer.
"""

from hypothesis import strategies as st
from msgspec.structs import replace

from eagletwin.harness.core.case import Case
from eagletwin.harness.families.valid import admits

SAMPLES = (1, 2, 3, 5)


def with_samples(draw: st.DrawFn, case: Case) -> Case:
    """The case with more than one sample of some of its prompts; not of requests that cannot have them."""
    for number, request in enumerate(case.requests):
        more = replace(request, n=draw(st.sampled_from(SAMPLES)))
        wanted = replace(case, requests=(*case.requests[:number], more, *case.requests[number + 1 :]))
        case = wanted if admits(wanted) else case
    return case
