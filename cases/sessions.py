"""Streaming sessions of a drawn case (asked.py draws them after all the rest): some of its requests become turns of one, more
turns come after them, and sessions are closed in between.

Simplest comes first: a case shrinks to one without sessions.
"""

from hypothesis import strategies as st
from msgspec.structs import replace

from eagletwin.harness.core.case import Case, Event, Request
from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.valid import admits

from .tokens import tokens

_SESSIONS = ("", "s", "s", "t")  # of a request of the case
_OWN = (1, 2, 5, 9)  # tokens of a further turn's own prompt
_MOST = 8  # requests of a case, with the further turns


def in_sessions(draw: st.DrawFn, case: Case) -> Case:
    """The case with sessions; as it is, where SGLang has none for it."""
    vocabulary = RECIPES[case.model].target.vocab_size
    for request in case.requests:
        session = draw(st.sampled_from(_SESSIONS))
        case = _first_admitted(_with(case, replace(request, session=session)), case) if session else case
    for session in _SESSIONS[2:]:
        for turn in range(draw(st.integers(0, 3))):
            own, answer, seed, later = draw(
                st.tuples(st.sampled_from(_OWN), st.integers(1, 8), st.integers(0, 255), st.integers(0, 12))
            )
            arrive = max(request.arrive for request in case.requests) + later
            more = Request(
                id=f"{session}-{turn}",
                prompt=tokens(seed, own, vocabulary),
                max_new_tokens=answer,
                arrive=arrive,
                session=session,
                sampling=case.requests[0].sampling,
            )
            if session in case.sessions and len(case.requests) < _MOST:
                case = _first_admitted(replace(case, requests=(*case.requests, more)), case)
        closes, at = draw(st.tuples(st.integers(0, 2), st.integers(0, 30)))
        if closes == 2:
            events = sorted((*case.events, Event(at=at, kind="close", session=session)), key=lambda event: event.at)
            case = _first_admitted(replace(case, events=tuple(events)), case)
    return case


def _with(case: Case, request: Request) -> Case:
    """The case with this request in place of the one that has its name."""
    return replace(case, requests=tuple(request if one.id == request.id else one for one in case.requests))


def _first_admitted(one: Case, other: Case) -> Case:
    return one if admits(one) else other
