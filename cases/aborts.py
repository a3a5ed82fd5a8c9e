"""Aborts that come inside a step, of requests of a drawn case (asked.py draws them after all the rest).

Of several samples of a prompt each may be aborted. A client that hangs up may ask the same again: then what the prefix cache
kept of the aborted request is used. Simplest comes first: a case shrinks to one in which no request is aborted.
"""

from hypothesis import strategies as st
from msgspec.structs import replace

from eagletwin.harness.core.case import Case, Event
from eagletwin.harness.core.samples import expanded
from eagletwin.harness.families.valid import admits

STEPS = (0, 2, 1, 3, 4, 0, 5, 6, 8)  # the batch of a request that it is aborted in; 0: it is not
_MOST_RETRIED = 8  # requests of a case, with those that come again


def aborted_in_steps(draw: st.DrawFn, case: Case) -> Case:
    """The case with some of its requests aborted inside a step, and some of these asked for once more."""
    for request in (sent for sent in expanded(case).requests if sent.max_new_tokens):
        step, again, later = draw(st.tuples(st.sampled_from(STEPS), st.integers(0, 3), st.integers(0, 6)))
        if not step:
            continue
        aborted = replace(case, events=(Event(at=0, kind="abort", request=request.id, step=step), *case.events))
        if not admits(aborted):  # its id is the beginning of another's
            continue
        case = aborted
        if again == 3 and len(case.requests) < _MOST_RETRIED:
            retry = replace(request, id=f"re-{request.id}", after="", arrive=request.arrive + step + later)
            more = replace(case, requests=(*case.requests, retry))
            case = more if admits(more) else case
    return case
