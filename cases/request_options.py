"""What requests of a drawn case ask for besides their tokens (strategies.py draws the case)."""

from collections.abc import Callable, Collection
from math import isfinite
from typing import Literal

import msgspec
from hypothesis import strategies as st
from msgspec.structs import replace

from eagletwin.harness.core.case import (
    Adapter,
    Ask,
    Bias,
    Case,
    EngineSettings,
    Event,
    Grammar,
    Logprobs,
    Penalties,
    Processor,
    Request,
    Sampling,
)
from eagletwin.harness.core.grammar import aborted_unread, writes
from eagletwin.harness.core.request_inputs import expanded, processed
from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.valid import admits

from .scenarios import tokens

# How requests of a drawn case sample: each in one of a few ways, or not at all (strategies.py draws the case).
#
# Retractions can be left out: with overlap they lose a round that is drawn again with other coins, and what the lost one
# committed has no reference then.

Kind = Literal["target", "rejection", "any"]  # what samples: the target alone, the draft too, either

# Simplest first. Below a half, tokens that a float32 cannot tell apart from each other's cut become common.
TEMPERATURES = (1.0, 0.7, 0.5, 1.6, 3.0)
TOP_KS = (0, 0, 2, 8, 40)
TOP_PS = (1.0, 1.0, 0.9, 0.5)


def samplings(greedy: bool) -> st.SearchStrategy[Sampling | None]:
    """How a request samples; `greedy`: one in four does not."""
    drawn: st.SearchStrategy[Sampling | None] = st.builds(
        Sampling, temperature=st.sampled_from(TEMPERATURES), top_k=st.sampled_from(TOP_KS), top_p=st.sampled_from(TOP_PS)
    )
    # not one_of, which takes a strategy that is named three times for one
    return st.integers(0, 3).flatmap(lambda number: st.none() if number == 3 else drawn) if greedy else drawn


def sampled(draw: st.DrawFn, case: Case, *, rejection: bool | None, greedy: bool, retract: bool) -> Case:
    """This case with at least one request that samples.

    rejection  whether the draft samples too; None: either, where it may
    greedy     whether some requests may be greedy
    retract    whether requests may be retracted (by an event; a small pool does it as well)
    """
    may = case.topk == 1 and RECIPES[case.model].samples_drafts
    rejected = may and (draw(st.booleans()) if rejection is None else rejection)
    ways = [draw(samplings(greedy)) for _ in case.requests]
    if all(way is None for way in ways):
        ways[0] = Sampling()
    if case.engine.sglang.deterministic:  # coins are hashed from a request's own seed then
        ways = [way and msgspec.structs.replace(way, seed=draw(st.integers(0, 255))) for way in ways]
    requests: tuple[Request, ...] = tuple(
        msgspec.structs.replace(request, sampling=way) for request, way in zip(case.requests, ways, strict=True)
    )
    settings = msgspec.structs.replace(case.engine.sglang, rejection_sampling=rejected, random_seed=draw(st.integers(0, 255)))
    kept = tuple(event for event in case.events if retract or event.kind != "retract")
    return msgspec.structs.replace(case, requests=requests, events=kept, engine=EngineSettings(sglang=settings))


# Small grammars of drawn cases, each of which some answer fits: regular expressions, and rules that refer to each other.
#
# Simplest comes first: a grammar shrinks to a single letter. A reference comes behind a letter, so that no rule begins with
# itself, and in no rule's first alternative, so that each has a text that ends. In rules, nothing is repeated that may be
# empty.

_LETTERS, _RULES = "abcd", "ABC"
_DEEP = 3
_TWINS = 2  # one grammar of rules in so many has twins


def _letters(draw: st.DrawFn) -> str:
    some = draw(st.lists(st.sampled_from(_LETTERS), min_size=1, max_size=4, unique=True))
    return some[0] if len(some) == 1 else f"({'|'.join(some)})"


def _text(draw: st.DrawFn, depth: int, *, nested: bool = True) -> str:
    """nested: whether what is repeated may have repetitions in it."""
    kind = draw(st.integers(0, 5)) if depth else 0
    if kind == 0:
        return _letters(draw)
    first = _text(draw, depth - 1 if nested or kind < 3 else 0, nested=nested)
    if kind == 1:
        return first + _text(draw, depth - 1, nested=nested)
    if kind == 2:
        return f"({first}|{_text(draw, depth - 1, nested=nested)})"
    return f"({first}){'*+?'[kind - 3]}"


def _rule(draw: st.DrawFn, rules: str) -> str:
    alternatives = [_text(draw, _DEEP - 1, nested=False)]
    for _ in range(draw(st.integers(1, 2))):
        around = [draw(st.sampled_from(_LETTERS)), draw(st.sampled_from(rules))]
        behind = draw(st.integers(0, 3))
        around += [_text(draw, 1, nested=False)] if behind else []
        around += [draw(st.sampled_from(_LETTERS)), draw(st.sampled_from(rules))] if behind == 3 else []
        alternatives.append("".join(around))
    return "|".join(alternatives)


def _twins(draw: st.DrawFn) -> str:
    """Two alternatives of one shape whose ends tell them apart: where one was taken back, the other is not the same."""
    first, second = draw(st.lists(st.sampled_from(_LETTERS), min_size=2, max_size=2, unique=True))
    ends = draw(st.lists(st.sampled_from(_LETTERS), min_size=2, max_size=2, unique=True))
    between = _letters(draw)
    return f"{first}{between}{ends[0]}|{second}{between}{ends[1]}"


@st.composite
def grammars(draw: st.DrawFn) -> Grammar:
    if draw(st.booleans()):
        names = _RULES[: draw(st.integers(1, 3))]
        rules = [_rule(draw, names) for _ in names]
        if draw(st.integers(1, _TWINS)) == _TWINS:
            rules[0] += f"|{_twins(draw)}"
        return Grammar(kind="ebnf", rules=tuple(rules))
    return Grammar(rules=(_text(draw, _DEEP),))


# Adapters (LoRA) of requests of a drawn case.
#
# Simplest comes first: a request shrinks to one without. There are few, so that requests of one adapter meet.

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


# Several samples of one prompt, of requests of a drawn case.
#
# Simplest comes first: a case shrinks to one in which each request wants one answer.

SAMPLES = (1, 2, 3, 5)


def with_samples(draw: st.DrawFn, case: Case) -> Case:
    """The case with more than one sample of some of its prompts; not of requests that cannot have them."""
    for number, request in enumerate(case.requests):
        more = replace(request, n=draw(st.sampled_from(SAMPLES)))
        wanted = replace(case, requests=(*case.requests[:number], more, *case.requests[number + 1 :]))
        case = wanted if admits(wanted) else case
    return case


# Aborts that come inside a step, of requests of a drawn case.
#
# Of several samples of a prompt each may be aborted. A client that hangs up may ask the same again: then what the prefix cache
# kept of the aborted request is used. Simplest comes first: a case shrinks to one in which no request is aborted.

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


# Streaming sessions of a drawn case: some of its requests become turns of
# one, more turns come after them, and sessions are closed in between.
#
# Simplest comes first: a case shrinks to one without sessions.

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


# What requests of a drawn case ask for beside their tokens (strategies.py draws the case).
#
# Each is drawn only where it is asked for, after all the rest, so that no old seed draws another case. Simplest comes first: a
# request shrinks to one that asks for nothing.

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
