"""Requests that ask for the logarithms of tokens' probabilities."""

from collections.abc import Iterator
from typing import Any

from eagletwin.harness.core.case import Case, Logprobs, Request
from eagletwin.harness.families import RECIPES

from .dimension import Refusal, of_requests, st


def _draw(draw: st.DrawFn, request: Request, vocabulary: int) -> Logprobs | None:
    """From the end of the prompt, from nowhere, from its beginning or from within it."""
    from_where, length = draw(st.integers(0, 3)), len(request.prompt)
    start = (-1, length, 0, 1 + (length - 1) // 2)[from_where]
    named = draw(st.lists(st.integers(0, vocabulary - 1), max_size=3))
    wanted = Logprobs(start=start, top=draw(st.integers(0, 4)), tokens=tuple(named))
    return wanted if draw(st.integers(0, 3)) else None


def _refusals(case: Case, request: Request) -> Iterator[Refusal]:
    wanted, size = request.logprobs, RECIPES[case.model].target.vocab_size
    if wanted is None:
        return
    if wanted.start > len(request.prompt):
        yield f": logprobs from {wanted.start} on of a prompt of {len(request.prompt)}", "begin at its end at the latest"
    if wanted.top > size or any(token >= size for token in wanted.tokens):
        yield f": logprobs of more tokens than the {size} of {case.model}", f"use at most {size}, from 0 on"


def _message(request: Request) -> dict[str, Any]:
    wanted = request.logprobs or Logprobs()
    return {
        "return_logprob": request.logprobs is not None,
        "logprob_start_len": wanted.start,
        "top_logprobs_num": wanted.top,
        "token_ids_logprob": list(wanted.tokens) or None,
    }


def _start(run: Any, record: Any) -> int:
    """From which place on the request is told its prompt's probabilities; -1: it is not."""
    wanted = run.requests[record.request].logprobs
    return -1 if wanted is None else int(wanted.start)


DIMENSION = of_requests(
    "logprobs",
    "logprobs",
    row="`return_logprob`; absent: none |",
    key="logprobs",
    example=Logprobs(start=0),
    draw=_draw,
    of_prompt=True,
    refuses=_refusals,
    message=_message,
    kinds={
        "logprobs_of_prompt": lambda case: any(
            request.logprobs is not None and request.logprobs.start >= 0 for request in case.requests
        )
    },
    happened={
        "logprobs_of_path": (
            "a request was told the probabilities of several tokens that one round gave it",
            lambda run: any(run.requests[one.request].logprobs and one.numbers["accept_len"] > 1 for one in run.verified),
        ),
        "logprobs_of_chunks": (
            "a request was told the probabilities of its prompt's tokens, which came in several chunks",
            lambda run: any(
                0 <= _start(run, one) < one.numbers["end"] < len(run.requests[one.request].prompt) for one in run.chunks
            ),
        ),
        "logprobs_behind_hit": (
            "a request reused a prefix, and was told the probabilities of its prompt's tokens behind it",
            lambda run: any(
                one.numbers["start"] <= _start(run, one) < len(run.requests[one.request].prompt) - 1 for one in run.hits
            ),
        ),
    },
)
