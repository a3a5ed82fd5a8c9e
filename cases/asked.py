"""What requests of a drawn case ask for beside their tokens (strategies.py draws the case).

Each is drawn only where it is asked for, after all the rest, so that no old seed draws another case. Simplest comes first: a
request shrinks to one that asks for nothing.
"""

from collections.abc import Callable, Collection
from math import isfinite
from typing import Literal

import msgspec
from hypothesis import strategies as st

from eagletwin.harness.core.case import Ask, Bias, Case, Logprobs, Penalties, Processor, Request
from eagletwin.harness.core.grammar import aborted_unread, writes
from eagletwin.harness.core.logits import processed
from eagletwin.harness.families import RECIPES

from .aborts import aborted_in_steps
from .adapters import with_adapters
from .grammars import grammars
from .samples import with_samples
from .sessions import in_sessions

MIN_PS = (0.0, 0.5, 0.2, 0.05, 1.0)
BIASES = (-4.0, 3.0, 8.0, -100.0)
PENALTIES = (0.0, 2.0, -2.0, 0.7)  # of frequency and of presence; a negative one makes repetitions more likely
REPETITIONS = (1.0, 2.0, 1.3, 0.5)
SEEDS = 16  # of processors
_OF_PROMPTS = ("logprobs", "hidden_states")  # what is given of a prompt as well: some ask for nothing else
STATES: tuple[Literal["", "last", "all"], ...] = ("", "all", "last", "all")


def _stream(draw: st.DrawFn, request: Request, _vocabulary: int) -> Request:
    return msgspec.structs.replace(request, stream=draw(st.integers(0, 3)) > 0)


def _min_p(draw: st.DrawFn, request: Request, _vocabulary: int) -> Request:
    """Of one that samples."""
    min_p = draw(st.sampled_from(MIN_PS))
    own = request.sampling
    return request if own is None else msgspec.structs.replace(request, sampling=msgspec.structs.replace(own, min_p=min_p))


def _logit_bias(draw: st.DrawFn, request: Request, vocabulary: int) -> Request:
    drawn = draw(st.lists(st.tuples(st.integers(0, vocabulary - 1), st.sampled_from(BIASES)), max_size=8))
    biases = tuple(Bias(token=token, value=value) for token, value in sorted(dict(drawn).items()))
    return msgspec.structs.replace(request, logit_bias=biases)


def _processor(draw: st.DrawFn, request: Request, _vocabulary: int) -> Request:
    kind: Literal["add", "forbid"] = draw(st.sampled_from(("add", "forbid")))
    processor = Processor(kind=kind, seed=draw(st.integers(0, SEEDS - 1)))
    return msgspec.structs.replace(request, processor=processor if draw(st.integers(0, 3)) else None)


def _logprobs(draw: st.DrawFn, request: Request, vocabulary: int) -> Request:
    """From the end of the prompt, from nowhere, from its beginning or from within it."""
    from_where, length = draw(st.integers(0, 3)), len(request.prompt)
    start = (-1, length, 0, 1 + (length - 1) // 2)[from_where]
    named = draw(st.lists(st.integers(0, vocabulary - 1), max_size=3))
    wanted = Logprobs(start=start, top=draw(st.integers(0, 4)), tokens=tuple(named))
    return msgspec.structs.replace(request, logprobs=wanted if draw(st.integers(0, 3)) else None)


def _penalties(draw: st.DrawFn, request: Request, _vocabulary: int) -> Request:
    wanted = Penalties(
        frequency=draw(st.sampled_from(PENALTIES)),
        presence=draw(st.sampled_from(PENALTIES)),
        repetition=draw(st.sampled_from(REPETITIONS)),
    )
    return msgspec.structs.replace(request, penalties=wanted if draw(st.integers(0, 3)) else None)


def _hidden_states(draw: st.DrawFn, request: Request, _vocabulary: int) -> Request:
    return msgspec.structs.replace(request, hidden_states=draw(st.sampled_from(STATES)))


def _min_new_tokens(draw: st.DrawFn, request: Request, _vocabulary: int) -> Request:
    """Up to as many as it may have; it matters to one that a token may end."""
    return msgspec.structs.replace(request, min_new_tokens=draw(st.integers(0, request.max_new_tokens)))


def _grammar(draw: st.DrawFn, request: Request, _vocabulary: int) -> Request:
    wanted = draw(grammars())
    return msgspec.structs.replace(request, grammar=wanted if draw(st.integers(0, 3)) else None)


def _possible(case: Case, request: Request, vocabulary: int) -> Request:
    """With a processor that leaves a grammar a token. Where llguidance allows one token alone, a processor that forbids it
    leaves none: nothing can be judged from there on. xgrammar allows all tokens of a text, and a processor a part of them.

    min_new_tokens may forbid the same token, as a stop token. It rarely does, and such a request stays as it is.
    """
    own, guided = request.processor, case.engine.sglang.grammar_backend == "llguidance"
    if own is None or own.kind != "forbid" or request.grammar is None or not guided:
        return request
    needed = writes(request.grammar)
    for further in range(SEEDS):
        processor = msgspec.structs.replace(own, seed=(own.seed + further) % SEEDS)
        more = processed(processor, vocabulary)
        if all(isfinite(more[token]) for token in needed):
            return msgspec.structs.replace(request, processor=processor)
    raise ValueError(f"each of {SEEDS} processors forbids one of the tokens {needed}")


ASKS: dict[Ask, Callable[[st.DrawFn, Request, int], Request]] = {
    "stream": _stream,
    "min_p": _min_p,
    "logit_bias": _logit_bias,
    "processor": _processor,
    "logprobs": _logprobs,
    "penalties": _penalties,
    "hidden_states": _hidden_states,
    "min_new_tokens": _min_new_tokens,
    "grammar": _grammar,
}
# What befalls a request, and is no field of it
IN_STEP: Ask = "abort_in_step"
# What makes turns of a session of some requests, and brings further ones
SESSION: Ask = "session"
# What is sent to the scheduler as several requests
SEVERAL: Ask = "n"
# What not every case can have
ADAPTER: Ask = "adapter"


@st.composite
def asking(draw: st.DrawFn, cases: st.SearchStrategy[Case], asks: Collection[str]) -> Case:
    """A case of which each request may ask for each of these, have an adapter, want several answers, be a turn of a session, or
    be aborted inside a step."""
    case = draw(cases)
    vocabulary, requests = RECIPES[case.model].target.vocab_size, list[Request]()
    for request in case.requests:
        if any(ask in asks for ask in _OF_PROMPTS) and draw(st.integers(0, 7)) == 7:
            request = msgspec.structs.replace(request, max_new_tokens=0)
        for ask, drawn in ASKS.items():
            if ask in asks:
                request = drawn(draw, request, vocabulary)
        if aborted_unread(case, request):  # no such case is admitted
            request = msgspec.structs.replace(request, grammar=None)
        requests.append(_possible(case, request, vocabulary))
    case = msgspec.structs.replace(case, requests=tuple(requests))
    case = with_adapters(draw, case) if ADAPTER in asks else case
    case = with_samples(draw, case) if SEVERAL in asks else case
    case = in_sessions(draw, case) if SESSION in asks else case
    return aborted_in_steps(draw, case) if IN_STEP in asks else case
