"""Smaller cases, made from any case by taking something away: for a case that no block of a search is at hand for."""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from eagletwin.cases.strategies import MODELS
from eagletwin.harness.core.case import (
    Adapter,
    Adaptive,
    Case,
    EngineSettings,
    Grammar,
    Logprobs,
    Penalties,
    Request,
    Sampling,
    SGLangSettings,
)
from eagletwin.harness.core.request_inputs import sent_for
from eagletwin.harness.families.valid import admits


def cuts(case: Case) -> Iterator[Case]:
    """Valid cases that are smaller by one thing each, those that lack the most first."""
    for smaller in _cuts(case):
        if smaller == case or (smaller.topk == 1 and smaller.verify_nodes != smaller.num_steps + 1):  # SGLang has no such chain
            continue
        if admits(smaller):
            yield smaller


def _cuts(case: Case) -> Iterator[Case]:
    for request in case.requests if len(case.requests) > 1 else ():
        others = tuple(one for one in case.requests if one.id != request.id)
        names = [sent.id for sent in sent_for(request)]
        yield replace(case, requests=others, events=tuple(one for one in case.events if one.request not in names))
    yield replace(case, events=())
    yield from _without_sessions(case)
    yield replace(case, chunks=())
    for kept in (len(case.chunks) // 2, len(case.chunks) - 1):
        yield replace(case, chunks=case.chunks[: max(kept, 0)])
    yield from _with_budget(case)
    yield from _simpler(case)
    for number in range(len(case.events)):
        yield replace(case, events=case.events[:number] + case.events[number + 1 :])
        yield replace(case, events=case.events[:number] + case.events[number + 2 :])  # a pause and its end
    for number, event in enumerate(case.events):
        for step in {1, event.step - 1} if event.step > 1 else ():
            yield replace(case, events=(*case.events[:number], replace(event, step=step), *case.events[number + 1 :]))
    for number, request in enumerate(case.requests):
        for smaller in _shorter(request):
            yield _with_request(case, number, smaller)
    for number, chunk in enumerate(case.chunks):
        for less in (case.page_size, chunk - case.page_size):
            if 0 < less < chunk:
                shorter = replace(case, chunks=(*case.chunks[:number], less, *case.chunks[number + 1 :]))
                yield shorter
                yield from _with_prompts_cut(shorter, chunk - less)


def _with_budget(case: Case) -> Iterator[Case]:
    """With the budget of all prefill batches in place of many equal ones."""
    head = case.chunks
    while head and head[-1] == case.chunks[-1]:
        head = head[:-1]
    if len(case.chunks) - len(head) > 2:
        yield replace(case, chunks=head, chunked_prefill_size=case.chunks[-1])


def _with_prompts_cut(case: Case, less: int) -> Iterator[Case]:
    """With one prompt shorter by as many tokens as its chunk: its last chunk has as many as before."""
    for number, request in enumerate(case.requests):
        if len(request.prompt) > less:
            yield _with_request(case, number, replace(request, prompt=request.prompt[less:]))


def _with_request(case: Case, number: int, request: Request) -> Case:
    """With another one in this place."""
    return replace(case, requests=(*case.requests[:number], request, *case.requests[number + 1 :]))


def _without_sessions(case: Case) -> Iterator[Case]:
    """Without all sessions, or without one: their requests stay, each with its own prompt alone."""
    for names in (case.sessions, *((name,) for name in case.sessions)):
        requests = tuple(replace(one, session="") if one.session in names else one for one in case.requests)
        yield replace(case, requests=requests, events=tuple(one for one in case.events if one.session not in names))


def _simpler(case: Case) -> Iterator[Case]:
    """With one setting as it usually is, or one size less."""
    usual, settings = SGLangSettings(), case.engine.sglang
    for name in settings.__struct_fields__:
        yield replace(case, engine=EngineSettings(sglang=replace(settings, **{name: getattr(usual, name)})))
    for adaptive in _simpler_choices(settings.adaptive) if settings.adaptive is not None else ():
        yield replace(case, engine=EngineSettings(sglang=replace(settings, adaptive=adaptive)))
    fields: dict[str, tuple[Any, ...]] = {
        "model": MODELS[: MODELS.index(case.model) if case.model in MODELS else len(MODELS)],
        "num_steps": tuple(range(1, case.num_steps)),
        "topk": tuple(range(1, case.topk)),
        "num_draft_tokens": (0, case.num_steps + 1, case.num_draft_tokens - 1) if case.num_draft_tokens else (),
        "page_size": (1,) if case.page_size > 1 else (),
    }
    for name, values in fields.items():
        for value in values:
            yield replace(case, **{name: value})
            if name in ("num_steps", "topk"):  # a tree of fewer steps or branches has fewer nodes
                yield replace(case, **{name: value, "num_draft_tokens": 0})


def _simpler_choices(adaptive: Adaptive) -> Iterator[Adaptive]:
    """Without one tier, without one number of steps of a tier, or with one knob as it usually is."""
    for number, tier in enumerate(adaptive.tiers):
        if len(adaptive.tiers) > 1:
            yield replace(adaptive, tiers=(*adaptive.tiers[:number], *adaptive.tiers[number + 1 :]))
        for steps in tier.steps if len(tier.steps) > 1 else ():
            less = replace(tier, steps=tuple(one for one in tier.steps if one != steps))
            yield replace(adaptive, tiers=(*adaptive.tiers[:number], less, *adaptive.tiers[number + 1 :]))
    usual = Adaptive(tiers=adaptive.tiers)
    for name in ("alpha", "interval", "warmup", "up", "down", "ceiling"):
        yield replace(adaptive, **{name: getattr(usual, name)})


def _shorter(request: Request) -> Iterator[Request]:
    half = len(request.prompt) // 2
    for prompt in (request.prompt[:1], request.prompt[:half], request.prompt[half:], request.prompt[:-1], request.prompt[1:]):
        if 0 < len(prompt) < len(request.prompt):
            yield replace(request, prompt=prompt)
    for new in (1, request.max_new_tokens // 2, request.max_new_tokens - 1):
        if 0 < new < request.max_new_tokens:
            yield replace(request, max_new_tokens=new, min_new_tokens=min(request.min_new_tokens, new))
    for n in range(2, request.n):
        yield replace(request, n=n)
    for less in (0, request.arrive - 1):
        if 0 <= less < request.arrive:
            yield replace(request, arrive=less)
    usual = Request(id=request.id, prompt=request.prompt, max_new_tokens=request.max_new_tokens)
    for name in (
        "stop",
        "sampling",
        "stream",
        "logit_bias",
        "processor",
        "logprobs",
        "penalties",
        "hidden_states",
        "min_new_tokens",
        "grammar",
        "session",
        "n",
        "after",
        "adapter",
    ):
        yield replace(request, **{name: getattr(usual, name)})
    for part, plain in (("logprobs", Logprobs()), ("penalties", Penalties())):
        wanted = getattr(request, part)
        for name in plain.__struct_fields__ if wanted is not None else ():
            yield replace(request, **{part: replace(wanted, **{name: getattr(plain, name)})})
    if request.grammar is not None:
        for grammar in _simpler_grammars(request.grammar):
            yield replace(request, grammar=grammar)
    if request.adapter is not None:
        for part in request.adapter.__struct_fields__:
            yield replace(request, adapter=replace(request.adapter, **{part: getattr(Adapter(), part)}))
    if request.sampling is not None:
        for part in request.sampling.__struct_fields__:
            yield replace(request, sampling=replace(request.sampling, **{part: getattr(Sampling(), part)}))


def _simpler_grammars(grammar: Grammar) -> Iterator[Grammar]:
    """Without one rule, or without one sign of one: check_case says which of them are grammars still."""
    for kept in range(1, len(grammar.rules)):
        yield replace(grammar, rules=grammar.rules[:kept])
    for number, rule in enumerate(grammar.rules):
        for first in range(len(rule)):
            for last in (len(rule), first + 3, first + 2, first + 1):
                less = rule[:first] + rule[last:]
                if less:
                    yield replace(grammar, rules=(*grammar.rules[:number], less, *grammar.rules[number + 1 :]))
