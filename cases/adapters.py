"""Adapters (LoRA) of requests of a drawn case (asked.py draws them after all the rest).

Simplest comes first: a request shrinks to one without. There are few, so that requests of one adapter meet.
"""

from hypothesis import strategies as st
from msgspec.structs import replace

from eagletwin.harness.core.case import Adapter, Case
from eagletwin.harness.families.valid import admits

ADAPTERS = (
    Adapter(),
    Adapter(seed=1, rank=2),
    Adapter(seed=2, rank=8, on="mlp"),
    Adapter(seed=3, rank=3, on="attention"),
    Adapter(seed=4, rank=4),
)


def with_adapters(draw: st.DrawFn, case: Case) -> Case:
    """The case with adapters of most of its requests; not of those that cannot have one."""
    for number, request in enumerate(case.requests):
        more = replace(request, adapter=draw(st.sampled_from((None, *ADAPTERS))))
        wanted = replace(case, requests=(*case.requests[:number], more, *case.requests[number + 1 :]))
        case = wanted if admits(wanted) else case
    return case
