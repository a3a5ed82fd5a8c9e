"""Events: aborts, of which some come inside a step, retractions, pauses and flushes.

Of several samples of a prompt each may be aborted. A client that hangs up may ask the same again: then what the prefix cache
kept of the aborted request is used.
"""

from collections.abc import Callable, Iterator
from typing import Any

from msgspec.structs import replace

from eagletwin.harness.core.case import Case, Event, expand_samples

from .dimension import Dimension, Has, Refusal, st, with_events

STEPS = (0, 2, 1, 3, 4, 0, 5, 6, 8)  # simplest first: the batch of a request that it is aborted in; 0: it is not
_MOST_RETRIED = 8  # requests of a case, with those that come again


def _draw(draw: st.DrawFn, case: Case, admits: Has) -> Case:
    """With some of its requests aborted inside a step, and some of these asked for once more."""
    for request in (sent for sent in expand_samples(case).requests if sent.max_new_tokens):
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


def _simpler(case: Case) -> Iterator[Case]:
    """In an earlier step."""
    for number, event in enumerate(case.events):
        for step in {1, event.step - 1} if event.step > 1 else ():
            yield replace(case, events=(*case.events[:number], replace(event, step=step), *case.events[number + 1 :]))


def _refusals(case: Case) -> Iterator[Refusal]:
    if [event.at for event in case.events] != sorted(event.at for event in case.events):
        yield "events are not in the order of `at`", "sort them"
    paused = False
    for number, event in enumerate(case.events):
        yield from ((f"events[{number}]{cause}", remedy) for cause, remedy in _refuse_event(case, event))
        if event.kind in ("pause", "resume"):
            if paused == (event.kind == "pause"):
                yield f"events[{number}]: {event.kind}, and the scheduler is {'' if paused else 'not '}paused", "remove it"
            paused = not paused


def _refuse_event(case: Case, event: Event) -> Iterator[Refusal]:
    ids = [request.id for request in case.requests]
    if (event.kind == "close") != bool(event.session):
        yield ": only a close names a session, and it must", "set or remove `session`"
    if event.kind == "close" and event.session not in case.sessions:
        yield f": no request is of session {event.session!r}", "name one that has requests"
    if (event.kind == "abort") != bool(event.request):
        yield ": only an abort names a request, and it must", "set or remove `request`"
    if event.step and (event.kind != "abort" or event.at):
        yield ": `step` is of an abort that comes inside a step, whose `at` is 0", "remove `step`, or `at`"
    if event.kind == "abort" and event.request not in ids:
        yield f": no request is called {event.request!r}", f"use one of {', '.join(ids)}"
    also = [name for name in ids if name != event.request and name.startswith(event.request)]
    if event.kind == "abort" and also:
        yield (
            f": SGLang aborts by prefix, so {event.request!r} would abort {also[0]!r} as well",
            "rename one of the two requests",
        )


def _of_events(name: str, words: str, of_it: Callable[[Event], bool], **more: Any) -> Dimension:
    return Dimension(
        name=name,
        words=words,
        has=lambda case: any(map(of_it, case.events)),
        size=lambda case: sum(map(of_it, case.events)),
        says=lambda case: f"{sum(map(of_it, case.events))} of {len(case.events)} events",
        plain="none",
        without=lambda case: iter([with_events(case, lambda event: not of_it(event))]),
        **more,
    )


IN_STEP = _of_events(
    "abort_in_step",
    "aborts inside a step",
    lambda event: event.step > 0,
    key="aborts-in-step",
    draw_case=_draw,
    simpler=_simpler,
    modes={"pp": "not driven", "dp": "not tried"},
    happened={
        "abort_in_step": (
            "a request was aborted while a batch of it ran: after its launch, and before its result was looked at",
            lambda run: any(map(run.under_way, run.of("abort"))),
        ),
        "abort_in_chunk": (
            "a request was aborted while a batch ran with a chunk of it that was not the last of its prompt",
            lambda run: any(
                record.stage == "prefill" and not record.numbers["final"]
                for abort in run.of("abort")
                for record in run.under_way(abort)
            ),
        ),
        "result_of_nobody": (
            "of a request that was aborted inside a step, one batch more ran, and gave it nothing",
            lambda run: any(map(run.given_to_nobody, run.of("abort"))),
        ),
    },
)
ABORTS = _of_events("aborts", "aborts", lambda event: event.kind == "abort", refusals=_refusals)
RETRACTIONS = _of_events("retractions", "retractions", lambda event: event.kind == "retract")
PAUSES = _of_events("pauses", "pauses", lambda event: event.kind in ("pause", "resume"))
FLUSHES = _of_events("flushes", "flushes", lambda event: event.kind == "flush")
DIMENSIONS = (RETRACTIONS, IN_STEP, ABORTS, PAUSES, FLUSHES)
