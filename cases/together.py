"""Requests whose prompts are prefilled together, where chunks would mostly keep them apart (strategies.py draws the case).

Layers that keep a state leave states of several prompts in one prefill then. Simplest comes first: a case shrinks to one as it
was drawn.
"""

from hypothesis import strategies as st
from msgspec.structs import replace

from eagletwin.harness.core.case import Case
from eagletwin.harness.families.valid import admits

_ONE_IN = 3


@st.composite
def together(draw: st.DrawFn, cases: st.SearchStrategy[Case]) -> Case:
    """A case; one in three with all of its requests at once, and in no chunks."""
    case = draw(cases)
    if draw(st.integers(1, _ONE_IN)) < _ONE_IN:
        return case
    gathered = replace(case, requests=tuple(replace(request, arrive=0) for request in case.requests), chunks=())
    return gathered if admits(gathered) else case
