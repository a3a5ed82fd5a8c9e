"""The features of a case that can be taken away one by one, each with a way to do so that leaves the rest as it is.

A feature is something that the case has more of than the plainest case would: pages, a tree, a second request, a prefix cache.
Taking it away may be done in several ways (which request stays?): then the fault needs the feature if it shows in none of them.
Ways are valid cases, or are left out.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from msgspec.structs import replace

from eagletwin.harness.core.case import Case, Request, SGLangSettings, encode_case
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.request_inputs import expanded, sent_for
from eagletwin.harness.families import RECIPES, family_of
from eagletwin.harness.families.recipe import Recipe
from eagletwin.harness.families.valid import decode_case, round_slots
from eagletwin.reference.sizes import count_candidates


@dataclass(frozen=True, slots=True)
class Feature:
    """name: a word; says: what the case has; plain: what takes its place. `without` gives the ways to do without it."""

    name: str
    says: Callable[[Case], str]
    plain: str
    has: Callable[[Case], bool]
    without: Callable[[Case], Iterator[Case]]


def _settings(case: Case, **changes: object) -> Case:
    return replace(case, engine=replace(case.engine, sglang=replace(case.engine.sglang, **changes)))


def _tokens(case: Case) -> int:
    """All that could ever be prefilled at once, in whole pages: prompts, and what a retracted request had emitted."""
    total = sum(len(request.prompt) + request.max_new_tokens for request in expanded(case).requests)
    return -(-total // case.page_size) * case.page_size


def _room(case: Case) -> int:
    """Slots with which no request ever waits for another's: what SGLang sets aside for each, in whole pages."""
    total = sum(
        len(one.prompt) + one.max_new_tokens + 2 * round_slots(case) + 2 * case.page_size for one in expanded(case).requests
    )
    return -(-max(total, 64) // case.page_size) * case.page_size


def _nodes(case: Case, topk: int, num_steps: int) -> int:
    """num_draft_tokens for another tree: as many as before, or as there can be; of a chain nothing is said."""
    if topk == 1 or not case.num_draft_tokens:
        return 0
    return max(2, min(case.num_draft_tokens, count_candidates(topk, num_steps) + 1))


def _single_step(case: Case) -> Iterator[Case]:
    yield replace(case, num_steps=1, num_draft_tokens=_nodes(case, case.topk, 1))


def _single_requests(case: Case) -> Iterator[Case]:
    for request in case.requests:
        names = ("", *(sent.id for sent in sent_for(request)))
        events = tuple(event for event in case.events if event.request in names)
        yield replace(case, requests=(replace(request, after=""),), events=events)


def _without_events(*kinds: str) -> Callable[[Case], Iterator[Case]]:
    def without(case: Case) -> Iterator[Case]:
        yield replace(case, events=tuple(event for event in case.events if event.kind not in kinds))

    return without


def _has_events(*kinds: str) -> Callable[[Case], bool]:
    return lambda case: any(event.kind in kinds for event in case.events)


def _with_model(model: str) -> Callable[[Case], Iterator[Case]]:
    """Another recipe; tokens that it does not have become others."""

    def without(case: Case) -> Iterator[Case]:
        size = RECIPES[model].target.vocab_size

        def known(request: Request) -> Request:
            return replace(
                request,
                prompt=tuple(token % size for token in request.prompt),
                stop=tuple(token for token in request.stop if token < size),
            )

        yield replace(case, model=model, requests=tuple(map(known, case.requests)))

    return without


def _of_llama(recipe: Recipe) -> str:
    """The Llama whose draft is of the same kind and has as many layers, chained or not, as far as there is one."""
    if recipe.algorithm == "EAGLE3":
        return "llama-eagle3" if recipe.draft_vocab_size else "llama-eagle3-full"
    if not recipe.mtp_layers:
        return "llama-tiny"
    return "llama-mtp-chain" if recipe.chained else "llama-mtp"


def _apart(case: Case) -> Iterator[Case]:
    """Requests without their sessions: each has its own prompt alone."""
    requests = tuple(replace(request, session="") for request in case.requests)
    yield replace(case, requests=requests, events=tuple(event for event in case.events if event.kind != "close"))


def _one_sample(case: Case) -> Iterator[Case]:
    names = ("", *(request.id for request in case.requests))
    events = tuple(event for event in case.events if event.request in names)
    yield replace(case, requests=tuple(replace(request, n=1) for request in case.requests), events=events)


def _without_adapters(case: Case) -> Iterator[Case]:
    yield replace(case, requests=tuple(replace(request, adapter=None) for request in case.requests))


def _waiting_for_none(case: Case) -> Iterator[Case]:
    yield replace(case, requests=tuple(replace(request, after="") for request in case.requests))


def _early(case: Case) -> Iterator[Case]:
    yield replace(case, requests=tuple(replace(request, arrive=0) for request in case.requests))


def _unstopped(case: Case) -> Iterator[Case]:
    yield replace(case, requests=tuple(replace(request, stop=()) for request in case.requests))


def _greedy(case: Case) -> Iterator[Case]:
    yield replace(case, requests=tuple(replace(request, sampling=None) for request in case.requests))


def _without_min_p(case: Case) -> Iterator[Case]:
    requests = tuple(
        request if request.sampling is None else replace(request, sampling=replace(request.sampling, min_p=0.0))
        for request in case.requests
    )
    yield replace(case, requests=requests)


def _asking_less(**fields: object) -> Callable[[Case], Iterator[Case]]:
    def without(case: Case) -> Iterator[Case]:
        yield replace(case, requests=tuple(replace(request, **fields) for request in case.requests))

    return without


def _drawn_coins(case: Case) -> Iterator[Case]:
    """Seeds belong to hashed coins."""
    requests = tuple(
        request if request.sampling is None else replace(request, sampling=replace(request.sampling, seed=None))
        for request in case.requests
    )
    yield replace(_settings(case, deterministic=False), requests=requests)


def _one_chunk(case: Case) -> Iterator[Case]:
    size = max(_tokens(case), case.chunked_prefill_size)
    yield replace(case, chunks=(), chunked_prefill_size=size)


# In the order in which they are taken away: what a later one does may depend on an earlier one.
FEATURES: tuple[Feature, ...] = (
    Feature(
        "model family",
        lambda case: f"{case.model}, in SGLang's own classes of that family",
        "Llama's (llama-tiny, llama-mtp, llama-mtp-chain)",
        lambda case: bool(family_of(RECIPES[case.model]).modules),
        lambda case: _with_model(_of_llama(RECIPES[case.model]))(case),
    ),
    Feature(
        "chained layers",
        lambda case: case.model,
        "layers that each consume the target's state (llama-mtp)",
        lambda case: RECIPES[case.model].chained,
        _with_model("llama-mtp"),
    ),
    Feature(
        "multi-layer draft",
        lambda case: case.model,
        "a single head (llama-tiny)",
        lambda case: RECIPES[case.model].mtp_layers > 0,
        _with_model("llama-tiny"),
    ),
    Feature(
        "draft vocabulary",
        lambda case: f"{case.model}, whose draft has a vocabulary of its own",
        "the target's (llama-eagle3-full)",
        lambda case: RECIPES[case.model].draft_vocab_size is not None,
        _with_model("llama-eagle3-full"),
    ),
    Feature(
        "EAGLE-3",
        lambda case: case.model,
        "EAGLE-1/2 (llama-tiny)",
        lambda case: RECIPES[case.model].algorithm == "EAGLE3",
        _with_model("llama-tiny"),
    ),
    Feature(
        "plain draft model",
        lambda case: case.model,
        "an EAGLE head (llama-tiny)",
        lambda case: RECIPES[case.model].algorithm == "STANDALONE",
        _with_model("llama-tiny"),
    ),
    Feature(
        "larger model",
        lambda case: f"{case.model}, of two layers with grouped heads",
        "one layer (llama-tiny)",
        lambda case: case.model in ("llama-gqa", "llama-wide"),
        _with_model("llama-tiny"),
    ),
    Feature(
        "several requests",
        lambda case: f"{len(case.requests)} requests",
        "one request: any of them",
        lambda case: len(case.requests) > 1,
        _single_requests,
    ),
    Feature(
        "late arrivals",
        lambda case: f"requests that arrive before iteration {max(one.arrive for one in case.requests)}",
        "all arrive at the start",
        lambda case: any(request.arrive for request in case.requests),
        _early,
    ),
    Feature(
        "sessions",
        lambda case: "requests that are turns of streaming sessions",
        "requests of their own",
        lambda case: bool(case.sessions),
        _apart,
    ),
    Feature(
        "several samples",
        lambda case: f"up to {max(one.n for one in case.requests)} samples of a prompt",
        "one answer of each",
        lambda case: any(one.n > 1 for one in case.requests),
        _one_sample,
    ),
    Feature(
        "waiting requests",
        lambda case: "requests that come after the end of others",
        "each comes at its arrival",
        lambda case: any(one.after for one in case.requests),
        _waiting_for_none,
    ),
    Feature(
        "retractions",
        lambda case: "retract events",
        "none",
        _has_events("retract"),
        _without_events("retract"),
    ),
    Feature(
        "aborts inside a step",
        lambda case: "abort events inside a step",
        "none of them inside a step",
        lambda case: any(event.step for event in case.events),
        lambda case: iter([replace(case, events=tuple(event for event in case.events if not event.step))]),
    ),
    Feature("aborts", lambda case: "abort events", "none", _has_events("abort"), _without_events("abort")),
    Feature(
        "pauses",
        lambda case: "pause and resume events",
        "none",
        _has_events("pause", "resume"),
        _without_events("pause", "resume"),
    ),
    Feature("flushes", lambda case: "flush events", "none", _has_events("flush"), _without_events("flush")),
    Feature(
        "stop tokens",
        lambda case: "tokens that end a request",
        "none",
        lambda case: any(request.stop for request in case.requests),
        _unstopped,
    ),
    Feature(
        "sampling",
        lambda case: "requests that sample",
        "all are greedy",
        lambda case: any(request.sampling is not None for request in case.requests),
        _greedy,
    ),
    Feature(
        "min_p",
        lambda case: "min_p",
        "0",
        lambda case: any(request.sampling is not None and request.sampling.min_p for request in case.requests),
        _without_min_p,
    ),
    Feature(
        "streams",
        lambda case: "requests that stream",
        "all tokens are sent at the end",
        lambda case: any(request.stream for request in case.requests),
        _asking_less(stream=False),
    ),
    Feature(
        "biased logits",
        lambda case: "logit_bias",
        "none",
        lambda case: any(request.logit_bias for request in case.requests),
        _asking_less(logit_bias=()),
    ),
    Feature(
        "logit processors",
        lambda case: "custom logit processors",
        "none",
        lambda case: case.processes,
        _asking_less(processor=None),
    ),
    Feature(
        "penalties",
        lambda case: "penalties on tokens that were sent before",
        "none",
        lambda case: any(request.penalties is not None for request in case.requests),
        _asking_less(penalties=None),
    ),
    Feature(
        "grammars",
        lambda case: "requests with a grammar",
        "none",
        lambda case: case.constrains,
        _asking_less(grammar=None),
    ),
    Feature(
        "grammar backend",
        lambda case: f"grammar_backend {case.engine.sglang.grammar_backend}",
        "SGLang's usual one",
        lambda case: case.constrains and case.engine.sglang.grammar_backend != SGLangSettings().grammar_backend,
        lambda case: iter([_settings(case, grammar_backend=SGLangSettings().grammar_backend)]),
    ),
    Feature(
        "logprobs",
        lambda case: "requests that are told probabilities",
        "none",
        lambda case: any(request.logprobs is not None for request in case.requests),
        _asking_less(logprobs=None),
    ),
    Feature(
        "hierarchical cache",
        lambda case: f"host_pages {case.engine.sglang.host_pages}",
        "none",
        lambda case: case.engine.sglang.host_pages > 0,
        lambda case: iter([_settings(case, host_pages=0, host_policy="write_through")]),
    ),
    Feature(
        "mixed chunks",
        lambda case: "mixed_chunks",
        "off",
        lambda case: case.engine.sglang.mixed_chunks,
        lambda case: iter([_settings(case, mixed_chunks=False)]),
    ),
    Feature(
        "adaptive steps",
        lambda case: "a number of draft steps that changes between rounds",
        "num_steps in each",
        lambda case: case.engine.sglang.adaptive is not None,
        lambda case: iter([_settings(case, adaptive=None)]),
    ),
    Feature(
        "plain decode",
        lambda case: "plain decode is asked as well",
        "not asked",
        lambda case: case.engine.sglang.plain_decode,
        lambda case: iter([_settings(case, plain_decode=False)]),
    ),
    Feature(
        "min_new_tokens",
        lambda case: "min_new_tokens",
        "0",
        lambda case: any(request.min_new_tokens for request in case.requests),
        _asking_less(min_new_tokens=0),
    ),
    Feature(
        "hidden states",
        lambda case: "requests that are given hidden states",
        "none",
        lambda case: case.gives_states != "",
        _asking_less(hidden_states=""),
    ),
    Feature(
        "a sink of the draft",
        lambda case: f"draft_sink {case.engine.sglang.draft_sink}",
        "0",
        lambda case: case.engine.sglang.draft_sink > 0,
        lambda case: iter([_settings(case, draft_sink=0)]),
    ),
    Feature(
        "a window of the draft",
        lambda case: f"draft_window {case.engine.sglang.draft_window}",
        "0",
        lambda case: case.engine.sglang.draft_window > 0,
        lambda case: iter([_settings(case, draft_window=0, draft_sink=0)]),
    ),
    Feature(
        "hashed coins",
        lambda case: "deterministic: coins that are hashed from seeds",
        "coins that are drawn",
        lambda case: case.engine.sglang.deterministic,
        _drawn_coins,
    ),
    Feature(
        "accept thresholds",
        lambda case: f"accept_single {case.engine.sglang.accept_single:g}, accept_acc {case.engine.sglang.accept_acc:g}",
        "1",
        lambda case: (case.engine.sglang.accept_single, case.engine.sglang.accept_acc) != (1, 1),
        lambda case: iter([_settings(case, accept_single=1.0, accept_acc=1.0)]),
    ),
    Feature(
        "rejection sampling",
        lambda case: "rejection_sampling",
        "the target alone samples",
        lambda case: case.engine.sglang.rejection_sampling,
        lambda case: iter([_settings(case, rejection_sampling=False)]),
    ),
    Feature(
        "pages",
        lambda case: f"page_size {case.page_size}",
        "page_size 1",
        lambda case: case.page_size > 1,
        lambda case: iter([replace(case, page_size=1)]),
    ),
    Feature(
        "tree",
        lambda case: f"topk {case.topk}",
        "topk 1",
        lambda case: case.topk > 1,
        lambda case: iter([replace(case, topk=1, num_draft_tokens=0)]),
    ),
    Feature(
        "several steps",
        lambda case: f"num_steps {case.num_steps}",
        "num_steps 1",
        lambda case: case.num_steps > 1,
        _single_step,
    ),
    Feature(
        "tree size",
        lambda case: f"num_draft_tokens {case.verify_nodes}",
        "num_steps + 1 of them",
        lambda case: case.topk > 1 and case.verify_nodes != case.num_steps + 1,
        lambda case: iter([replace(case, num_draft_tokens=0)]),
    ),
    Feature(
        "prefix cache",
        lambda case: "radix_cache",
        "none",
        lambda case: case.engine.sglang.radix_cache,
        lambda case: iter(
            [_settings(one, radix_cache=False, host_pages=0, host_policy="write_through") for one in _apart(case)]
        ),
    ),
    Feature(
        "chunks",
        lambda case: f"prefill in chunks ({', '.join(map(str, (*case.chunks, case.chunked_prefill_size)))})",
        "all prompts in one batch",
        lambda case: bool(case.chunks) or case.chunked_prefill_size < _tokens(case),
        _one_chunk,
    ),
    Feature(
        "adapters",
        lambda case: f"requests with {len(case.adapters)} adapters",
        "none has one",
        lambda case: bool(case.adapters),
        _without_adapters,
    ),
    Feature(
        "lora backend",
        lambda case: f"lora_backend {case.engine.sglang.lora_backend}",
        "SGLang's usual one",
        lambda case: bool(case.adapters) and case.engine.sglang.lora_backend != SGLangSettings().lora_backend,
        lambda case: iter([_settings(case, lora_backend=SGLangSettings().lora_backend)]),
    ),
    Feature(
        "adapters in turns",
        lambda case: f"max_loras_per_batch {case.engine.sglang.max_loras_per_batch}",
        "as many as there are adapters, and none",
        lambda case: case.engine.sglang.max_loras_per_batch < len(case.adapters) + 1,
        lambda case: iter([_settings(case, max_loras_per_batch=min(8, len(case.adapters) + 1))]),
    ),
    Feature(
        "weight update",
        lambda case: f"update_weights {case.engine.sglang.update_weights}",
        "the worker starts with its weights",
        lambda case: bool(case.engine.sglang.update_weights),
        lambda case: iter([_settings(case, update_weights="")]),
    ),
    Feature(
        "batch limit",
        lambda case: f"max_running_requests {case.engine.sglang.max_running_requests}",
        "as many as there are requests",
        lambda case: case.engine.sglang.max_running_requests < len(expanded(case).requests),
        lambda case: iter([_settings(case, max_running_requests=len(expanded(case).requests))]),
    ),
    Feature(
        "short context",
        lambda case: f"context_length {case.engine.sglang.context_length}",
        "the recipe's",
        lambda case: case.engine.sglang.context_length > 0,
        lambda case: iter([_settings(case, context_length=0)]),
    ),
    Feature(
        "small pool",
        lambda case: f"max_total_tokens {case.engine.sglang.max_total_tokens}",
        "room for all requests at once",
        lambda case: case.engine.sglang.max_total_tokens < _room(case),
        lambda case: iter([_settings(case, max_total_tokens=_room(case))]),
    ),
)


def features_of(case: Case) -> tuple[Feature, ...]:
    """The features that a case has."""
    return tuple(feature for feature in FEATURES if feature.has(case))


def variants(case: Case, without: Collection[Feature]) -> list[Case]:
    """All ways to do without these features: valid cases that name nothing they are for. Equal ones once."""
    found = [replace(case, exercises=())]
    for feature in FEATURES:
        if feature in without:
            found = [other for one in found for other in (feature.without(one) if feature.has(one) else (one,))]
    return [other for other in dict.fromkeys(found) if _valid(other)]


def _valid(case: Case) -> bool:
    try:
        decode_case(encode_case(case), "a variant")
    except InputError:
        return False
    return True
