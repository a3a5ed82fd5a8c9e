"""Several samples of one prompt: the scheduler is sent other requests in place of one (core/case.py)."""

from collections.abc import Iterator

from msgspec.structs import replace

from eagletwin.harness.core.case import LONGEST, MOST_LETTERS, MOST_REQUESTS, Case, expand_samples, several

from .dimension import Refusal, draw_each, of_requests, with_events, with_requests

SAMPLES = (1, 2, 3, 5)


def _refusals(case: Case) -> Iterator[Refusal]:
    """What several samples of a prompt need: room for the requests that the scheduler is sent in place of one."""
    for request in several(case):
        where = f"request {request.id!r} with n {request.n}"
        if request.session:
            yield f"{where} is a turn of a session, which goes on from one answer", "leave one of the two out"
        if not request.max_new_tokens:
            yield f"{where} and max_new_tokens 0: there would be nothing of which to have several", "set n to 1"
        if any(event.request == request.id for event in case.events):
            yield (
                f"{where} is aborted: the scheduler is sent an abort of each of its samples that the client waits for, and "
                "eagletwin does not play that part",
                "remove the event, or set n to 1",
            )
        if any(other.after == request.id for other in case.requests):
            yield (f"{where}: another request comes after it, and it has {request.n} ends", "set its n to 1, or remove `after`")
        if len(request.id) + len(LONGEST) >= MOST_LETTERS:
            yield f"{where}: no room in the id for the number of a sample", "shorten the id"
    if (count := len(expand_samples(case).requests)) > MOST_REQUESTS:
        yield (
            f"the scheduler would be sent {count} requests, n and one more for each with several samples",
            f"lower n; {MOST_REQUESTS} are the most",
        )


def _without(case: Case) -> Iterator[Case]:
    names = ("", *(request.id for request in case.requests))
    yield with_requests(with_events(case, lambda event: event.request in names), lambda request: replace(request, n=1))


DIMENSION = of_requests(
    "n",
    "several samples",
    key="samples",
    size=int,
    smaller=lambda n: iter(range(2, n)),
    example=2,
    draw_case=draw_each("n", SAMPLES),
    refusals=_refusals,
    of_sent=False,
    without=_without,
    happened={
        "several_samples": (
            "samples of one prompt (n) were in one decode batch",
            lambda run: any(map(run.has_samples, run.decoded)),
        ),
        "samples_share_prompt": (
            "a sample of a prompt reused rows that the request before all samples had left of it",
            lambda run: any(record.request in run.samples for record in run.hits),
        ),
    },
)
