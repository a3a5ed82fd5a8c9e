"""Streaming sessions: some requests of a case become turns of one, more turns come after them, and sessions are closed in
between. Simplest comes first: a case shrinks to one without sessions."""

from collections.abc import Iterator

from msgspec.structs import replace

from eagletwin.harness.core.case import Case, Event, Request, most_before
from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.recipe import Recipe

from .dimension import Has, Refusal, of_requests, round_slots, st, tokens, with_requests

_SESSIONS = ("", "s", "s", "t")  # of a request of the case
_OWN = (1, 2, 5, 9)  # tokens of a further turn's own prompt
_MOST = 8  # requests of a case, with the further turns


def keeps_sessions(recipe: Recipe) -> bool:
    """Whether streaming sessions of this model can be judged."""
    return not recipe.target.states and not recipe.window


def _draw(draw: st.DrawFn, case: Case, admits: Has) -> Case:
    """The case with sessions; as it is, where SGLang has none for it."""
    vocabulary = RECIPES[case.model].target.vocab_size

    def pick_admitted(one: Case, other: Case) -> Case:
        return one if admits(one) else other

    for request in case.requests:
        if session := draw(st.sampled_from(_SESSIONS)):
            own = replace(request, session=session)
            changed = with_requests(case, lambda one: own if one.id == own.id else one)  # noqa: B023
            case = pick_admitted(changed, case)
    for session in _SESSIONS[2:]:
        for turn in range(draw(st.integers(0, 3))):
            own_tokens, answer, seed, later = draw(
                st.tuples(st.sampled_from(_OWN), st.integers(1, 8), st.integers(0, 255), st.integers(0, 12))
            )
            more = Request(
                id=f"{session}-{turn}",
                prompt=tokens(seed, own_tokens, vocabulary),
                max_new_tokens=answer,
                arrive=max(request.arrive for request in case.requests) + later,
                session=session,
                sampling=case.requests[0].sampling,
            )
            if session in case.sessions and len(case.requests) < _MOST:
                case = pick_admitted(replace(case, requests=(*case.requests, more)), case)
        closes, at = draw(st.tuples(st.integers(0, 2), st.integers(0, 30)))
        if closes == 2:
            events = sorted((*case.events, Event(at=at, kind="close", session=session)), key=lambda event: event.at)
            case = pick_admitted(replace(case, events=tuple(events)), case)
    return case


def _without(case: Case, names: tuple[str, ...]) -> Case:
    """Without these sessions: their requests stay, each with its own prompt alone."""
    apart = with_requests(case, lambda one: replace(one, session="") if one.session in names else one)
    return replace(apart, events=tuple(event for event in case.events if event.session not in names))


def _most_tokens(case: Case, request: Request) -> int:
    """Tokens of a request at its end, with those of its session before it."""
    return most_before(case, request.id) + len(request.prompt) + request.max_new_tokens


def _is_last_turn(case: Case, request: Request) -> bool:
    of_it = [other.id for other in case.requests if other.session == request.session]
    return bool(request.session) and of_it[-1] == request.id


def _refusals(case: Case) -> Iterator[Refusal]:
    """What streaming sessions need, and what SGLang would refuse or leave out."""
    if not case.sessions:
        return
    settings, target = case.engine.sglang, RECIPES[case.model].target
    if not settings.radix_cache:
        yield "a session without the prefix cache, which keeps its rows", "set radix_cache"
    if settings.host_pages:
        yield "a session with host_pages: eagletwin does not follow rows that both keep", "leave one of them out"
    if not keeps_sessions(RECIPES[case.model]):
        what = "states of layers" if target.states else "slots of a window"
        yield f"a session with {case.model}: eagletwin does not follow the {what} that a session keeps", "use another model"
    yield from _without_room(case)
    if sum(event.kind == "pause" for event in case.events) > sum(event.kind == "resume" for event in case.events):
        yield "a session, and a pause without an end: its requests would wait", "add a resume"
    for request in (request for request in case.requests if request.session):
        where = f"request {request.id!r} of session {request.session!r}"
        if request.logprobs is not None and request.logprobs.start >= 0:
            yield f"{where}: logprobs of its prompt, which SGLang leaves out in a session", "set start to -1"
        of_it = [event for event in case.events if event.kind == "abort" and event.request == request.id and not event.step]
        if request.grammar is not None and of_it:
            yield (
                f"{where}: it has a grammar, and may be aborted before that is read; SGLang then runs another prompt",
                "abort it inside a step, or leave the grammar out",
            )


def _without_room(case: Case) -> Iterator[Refusal]:
    """SGLang takes nothing from a session: requests that find no room beside it wait for ever."""
    settings, ahead = case.engine.sglang, 2 * round_slots(case) + 2 * case.page_size
    kept = sum(_most_tokens(case, request) + ahead for request in case.requests if _is_last_turn(case, request))
    others = [_most_tokens(case, request) + ahead for request in case.requests if not request.session]
    need = kept + max(others, default=0)
    if need > settings.max_total_tokens:
        yield (
            f"sessions with up to {need} slots, and the pool has {settings.max_total_tokens}: nobody takes from them "
            "what they hold, and another request would wait for ever",
            "shorten their requests or raise engine.sglang.max_total_tokens",
        )
    entries = len(case.sessions) + bool(others)
    if entries > settings.max_running_requests:
        yield (
            f"{len(case.sessions)} sessions and max_running_requests {settings.max_running_requests}: each keeps an "
            "entry of req_to_token, and another request would wait for ever",
            f"raise engine.sglang.max_running_requests to {entries}",
        )


_SENTENCES = {
    "session_goes_on": "a request went on behind the rows that its session had kept",
    "session_in_page": "a request went on behind rows that its session had kept, and these ended inside a page (page_size > 1)",
    "session_cut": "a request went on behind rows that its session had kept, and verify had committed more than the request "
    "before was sent",
    "session_retracted": "a request of a session lost its place in the batch, and came back",
    "session_after_abort": "a request of a session came after one that was aborted",
    "session_waits_to_close": "a session was closed while a request of it ran",
    "session_again": "a session was opened again after it was closed",
}
DIMENSION = of_requests(
    "session",
    "sessions",
    key="sessions",
    example="s",
    draw_case=_draw,
    refusals=_refusals,
    simpler=lambda case: (_without(case, names) for names in (case.sessions, *((name,) for name in case.sessions))),
    without=lambda case: iter([_without(case, case.sessions)]),
    kind=True,
    kinds={"session_with_adapter": lambda case: bool(case.sessions) and bool(case.adapters)},
    modes={"pp": "not driven", "dp": "not tried"},
    argument="enable_streaming_session",
    happened={name: (sentence, lambda run, name=name: name in run.sessions) for name, sentence in _SENTENCES.items()},
)
