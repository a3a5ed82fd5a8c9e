"""A case: what to do, as plain data (JSON). Read from strangers, so every field has a type and a bound, and none is a path.

A neutral core (model recipe, requests, events, num_steps, topk, num_draft_tokens, page and chunk sizes) and one block of
settings for each engine. It never holds code. `exercises` names what a hand-made case is for; the judge says `unknown` if that
did not happen.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from eagletwin.reference.sizes import count_candidates, reserved

from .errors import InputError
from .exercised import FEATURES
from .models.recipes import RECIPES
from .words import count

SCHEMA = 1
MAX_FILE_BYTES = 1 << 20  # the largest valid case, 64 prompts of 2,048 tokens, is some 700 kB of JSON

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
Token = Annotated[int, Meta(ge=0, lt=1 << 20)]


class Sampling(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a request samples: of softmax(logits / temperature), the top_k largest (0: all), of these the top_p largest mass.

    seed: what its coins are hashed from, where `engine.sglang.deterministic` has them hashed and not drawn.
    """

    # below a hundredth a float32 softmax of these models' logits has one token left
    temperature: Annotated[float, Meta(ge=0.01, le=100)] = 1.0
    top_k: Annotated[int, Meta(ge=0, lt=1 << 20)] = 0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    seed: Annotated[int, Meta(ge=0, lt=1 << 62)] | None = None


class Request(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request. `arrive` is the scheduler iteration, from 0, before which it is handed in.

    stop  tokens of which the first emitted one ends the request, as does the recipe's end-of-sequence token then; with
          none of them, only max_new_tokens does
    sampling  absent: greedy
    """

    id: Name
    prompt: Annotated[tuple[Token, ...], Meta(min_length=1, max_length=2048)]
    max_new_tokens: Annotated[int, Meta(ge=1, le=512)]
    arrive: Annotated[int, Meta(ge=0, le=1000)] = 0
    stop: Annotated[tuple[Token, ...], Meta(max_length=64)] = ()
    sampling: Sampling | None = None


class Event(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that befalls the scheduler before iteration `at` (from 0), after that iteration's arrivals.

    abort    the client of `request` hangs up
    retract  all running requests lose their slots and go back to the queue
    pause    nothing is scheduled until the next resume; one that never comes comes after the last event
    flush    empty the prefix cache; SGLang refuses while anything runs
    """

    at: Annotated[int, Meta(ge=0, le=1000)]
    kind: Literal["abort", "retract", "pause", "resume", "flush"]
    request: Annotated[str, Meta(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,63})?\Z")] = ""


class SGLangSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What only SGLang has: `max_total_tokens` is the size of the KV pool in slots; `context_length` 0: the recipe's.

    update_weights: the worker starts with other weights, and is given the recipe's by this path before the first request.
    rejection_sampling: --speculative-use-rejection-sampling: the draft samples too; else only the target does.
    accept_single, accept_acc: --speculative-accept-threshold-single, -acc: below 1, more drafts of a tree are accepted.
    deterministic: --enable-deterministic-inference: coins are hashed from the requests' seeds.
    random_seed: what coins that are drawn begin from.
    """

    radix_cache: bool = False
    max_running_requests: Annotated[int, Meta(ge=1, le=64)] = 8
    max_total_tokens: Annotated[int, Meta(ge=64, le=65536)] = 1024
    context_length: Annotated[int, Meta(ge=0, le=4096)] = 0
    update_weights: Literal["", "disk", "tensor"] = ""
    rejection_sampling: bool = False
    accept_single: Annotated[float, Meta(gt=0, le=1)] = 1.0
    accept_acc: Annotated[float, Meta(gt=0, le=1)] = 1.0
    deterministic: bool = False
    random_seed: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0


class EngineSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    sglang: SGLangSettings = SGLangSettings()


class Case(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an engine is to do. Sizes are in tokens; `chunked_prefill_size` is a whole number of pages."""

    schema: int = SCHEMA
    name: Name
    model: Name
    requests: Annotated[tuple[Request, ...], Meta(min_length=1, max_length=64)]
    # 16 steps: past the longest chain anyone serves; each step costs the engine one forward
    num_steps: Annotated[int, Meta(ge=1, le=16)]
    topk: Annotated[int, Meta(ge=1, le=64)] = 1
    # nodes that the target verifies in a round, the bonus token among them; 0: as many as the longest path, num_steps + 1
    draft_tokens: Annotated[int, Meta(ge=0, le=1024)] = msgspec.field(default=0, name="num_draft_tokens")
    page_size: Annotated[int, Meta(ge=1, le=128)] = 1
    chunked_prefill_size: Annotated[int, Meta(ge=1, le=8192)] = 64
    # sizes of the first prefill batches; chunked_prefill_size holds after the last
    chunks: Annotated[tuple[Annotated[int, Meta(ge=1, le=8192)], ...], Meta(max_length=1024)] = ()
    events: Annotated[tuple[Event, ...], Meta(max_length=64)] = ()
    exercises: tuple[str, ...] = ()
    engine: EngineSettings = EngineSettings()

    @property
    def num_draft_tokens(self) -> int:
        """Nodes that the target verifies in a round: the bonus token and the drafts."""
        return self.draft_tokens or self.num_steps + 1

    @property
    def round_slots(self) -> int:
        """Slots that SGLang sets aside for one round of a request, before its tree is known."""
        return reserved(self.topk, self.num_steps, self.page_size, self.num_draft_tokens)

    @property
    def samples(self) -> bool:
        """Whether anything in it hangs on chance."""
        return self.engine.sglang.rejection_sampling or any(request.sampling is not None for request in self.requests)

    def sampled(self, request: str) -> Sampling | None:
        """How this request samples; None: it is greedy, as one that takes the best of all tokens is."""
        asked = next(one.sampling for one in self.requests if one.id == request)
        return None if asked is None or asked.top_k == 1 else asked

    def draws_drafts(self, request: str) -> bool:
        """Whether the draft draws this request's tokens. Those of a greedy one are the best: any other would be refused."""
        return self.engine.sglang.rejection_sampling and self.sampled(request) is not None

    def configuration(self) -> "Case":
        """This case without what differs from case to case on one engine: equal configurations share an engine process.

        Cases that sample do not share one with those that do not: on a CPU the worker is changed for them.
        """
        nothing = Request(id="none", prompt=(0,), max_new_tokens=1, sampling=Sampling() if self.samples else None)
        engine = EngineSettings(sglang=msgspec.structs.replace(self.engine.sglang, random_seed=0))
        return msgspec.structs.replace(
            self, name="configuration", requests=(nothing,), chunks=(), events=(), exercises=(), engine=engine
        )

    @property
    def last_arrival(self) -> int:
        """The last scheduler iteration before which something is handed in or befalls the scheduler."""
        return max([0, *(request.arrive for request in self.requests), *(event.at for event in self.events)])


def _refuse(cause: str, remedy: str) -> InputError:
    return InputError(cause, consequence="nothing was run and nothing was written", remedy=remedy)


def read_case(path: Path) -> Case:
    """The case in a file. Raises InputError for anything that is not a valid case."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise _refuse(f"{path}: {error.strerror}", "name a case file (JSON) or the id of a ledger entry") from error
    if len(data) > MAX_FILE_BYTES:
        raise _refuse(f"{path}: larger than {MAX_FILE_BYTES} bytes", "a case is a few requests; cut it down")
    return decode_case(data, str(path))


def decode_case(data: bytes, origin: str) -> Case:
    """Decode and validate JSON; `origin` names it in errors."""
    try:
        raw = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _refuse(f"{origin}: not JSON ({error})", "give a case file written by eagletwin") from error
    schema = raw.get("schema", SCHEMA) if isinstance(raw, dict) else SCHEMA
    if isinstance(schema, int) and schema > SCHEMA:
        raise _refuse(
            f"{origin}: case schema {schema}; this eagletwin reads up to {SCHEMA}", "use the eagletwin that wrote it, or newer"
        )
    try:
        case = msgspec.convert(raw, Case)
    except msgspec.ValidationError as error:
        raise _refuse(f"{origin}: {error}", "correct the field; docs/case.md lists all of them") from error
    check_case(case, origin)
    return case


def check_case(case: Case, origin: str) -> None:
    """The rules that tie fields together. Raises InputError."""
    if case.schema != SCHEMA:
        raise _refuse(f"{origin}: case schema {case.schema} does not exist", f"set it to {SCHEMA}")
    if case.model not in RECIPES:
        raise _refuse(f"{origin}: no model recipe is called {case.model!r}", f"use one of {', '.join(sorted(RECIPES))}")
    unknown = [feature for feature in case.exercises if feature not in FEATURES]
    if unknown:
        raise _refuse(f"{origin}: exercises {unknown[0]!r} is not known", f"use some of {', '.join(FEATURES)}")
    if case.chunked_prefill_size % case.page_size:
        raise _refuse(
            f"{origin}: chunked_prefill_size {case.chunked_prefill_size} is not a whole number of pages of {case.page_size}",
            "SGLang wants whole pages; make it a multiple of page_size",
        )
    for number, chunk in enumerate(case.chunks):
        if chunk % case.page_size:
            raise _refuse(
                f"{origin}: chunks[{number}] is {chunk}, not a whole number of pages of {case.page_size}",
                "SGLang wants whole pages; make it a multiple of page_size",
            )
    _check_events(case, origin)
    _check_tree(case, origin)
    _check_layers(case, origin)
    _check_sampling(case, origin)
    settings, recipe = case.engine.sglang, RECIPES[case.model]
    if settings.max_total_tokens % case.page_size:
        raise _refuse(
            f"{origin}: max_total_tokens {settings.max_total_tokens} is not a whole number of pages of {case.page_size}",
            "make it a multiple of page_size",
        )
    if settings.update_weights and (recipe.family != "llama" or recipe.mtp_layers or recipe.algorithm != "EAGLE"):
        raise _refuse(
            f"{origin}: update_weights with {case.model}, whose target and draft have no checkpoint in common",
            "use llama-tiny or llama-gqa",
        )
    ids = [request.id for request in case.requests]
    if len(set(ids)) < len(ids):
        raise _refuse(f"{origin}: two requests have the same id", "give each request an id of its own")
    for request in case.requests:
        where = f"{origin}: request {request.id!r}"
        outside = [token for token in request.prompt if token >= recipe.target.vocab_size]
        if outside:
            raise _refuse(
                f"{where}: token {outside[0]} is outside the vocabulary of {case.model}",
                f"use ids from 0 to {recipe.target.vocab_size - 1}",
            )
        # SGLang reserves room for two rounds ahead, in whole pages, before it lets a request run
        need = len(request.prompt) + request.max_new_tokens + 2 * case.round_slots + 2 * case.page_size
        if need > settings.max_total_tokens:
            raise _refuse(
                f"{where}: needs up to {need} slots, and the pool has {settings.max_total_tokens}",
                "shorten the request or raise engine.sglang.max_total_tokens",
            )
        if 0 < recipe.window < len(request.prompt) + request.max_new_tokens + 2 * case.num_draft_tokens:
            raise _refuse(
                f"{where}: longer than the window of {case.model}, and the reference knows no windows",
                f"keep prompt, new tokens and two rounds of drafts to {recipe.window}",
            )
        # what SGLang admits without cutting it down
        context = settings.context_length or recipe.max_position
        length = len(request.prompt) + request.max_new_tokens
        if len(request.prompt) > context - 7 or length > context - 2:
            raise _refuse(
                f"{where}: a prompt of {len(request.prompt)} and {length} tokens in all, in a context of {context}",
                f"keep to {context - 7} and {context - 2}",
            )


def _check_layers(case: Case, origin: str) -> None:
    layers = RECIPES[case.model].mtp_layers
    if layers and case.num_steps > layers:
        raise _refuse(f"{origin}: num_steps {case.num_steps}: {case.model} has {layers} layers", f"use 1 to {layers}")
    if layers and case.num_draft_tokens != case.num_steps + 1:
        raise _refuse(
            f"{origin}: num_draft_tokens {case.num_draft_tokens}: a multi-layer draft of {count(case.num_steps, 'step')} has "
            f"{case.num_steps + 1}",
            "leave num_draft_tokens out",
        )


def _check_sampling(case: Case, origin: str) -> None:
    """What SGLang refuses when it starts, and what it would silently leave out."""
    settings = case.engine.sglang
    if settings.rejection_sampling and case.topk > 1:
        raise _refuse(f"{origin}: rejection_sampling with topk {case.topk}: SGLang has it for chains only", "use topk 1")
    if settings.rejection_sampling and (settings.accept_single, settings.accept_acc) != (1, 1):
        raise _refuse(f"{origin}: rejection_sampling with thresholds, which it knows none of", "leave one of them out")
    heads = RECIPES[case.model].draft_vocab_size
    if settings.rejection_sampling and heads is not None:
        raise _refuse(
            f"{origin}: rejection_sampling with {case.model}, whose draft knows {heads} tokens and its target more",
            "use a model with one vocabulary, such as llama-eagle3-full",
        )
    for request in case.requests:
        if request.sampling is None or settings.deterministic == (request.sampling.seed is not None):
            continue
        raise _refuse(
            f"{origin}: request {request.id!r} has {'no seed' if settings.deterministic else 'a seed'}, and deterministic is "
            f"{str(settings.deterministic).lower()}",
            "SGLang hashes coins from seeds with engine.sglang.deterministic, and only then: give both or neither",
        )


def _check_tree(case: Case, origin: str) -> None:
    most = count_candidates(case.topk, case.num_steps) + 1
    if case.num_draft_tokens < 2:
        raise _refuse(f"{origin}: num_draft_tokens {case.num_draft_tokens}: nothing would be drafted", "use 2 or more")
    if case.topk > 1 and case.num_draft_tokens > most:
        raise _refuse(
            f"{origin}: num_draft_tokens {case.num_draft_tokens}: a tree of topk {case.topk} and "
            f"{count(case.num_steps, 'step')} has {most} nodes",
            f"use 2 to {most}; below {case.num_steps + 1} the worker dies of the ledger's small-tree",
        )


def _check_events(case: Case, origin: str) -> None:
    ids = [request.id for request in case.requests]
    if [event.at for event in case.events] != sorted(event.at for event in case.events):
        raise _refuse(f"{origin}: events are not in the order of `at`", "sort them")
    paused = False
    for number, event in enumerate(case.events):
        where = f"{origin}: events[{number}]"
        if (event.kind == "abort") != bool(event.request):
            raise _refuse(f"{where}: only an abort names a request, and it must", "set or remove `request`")
        if event.kind == "abort" and event.request not in ids:
            raise _refuse(f"{where}: no request is called {event.request!r}", f"use one of {', '.join(ids)}")
        also = [name for name in ids if name != event.request and name.startswith(event.request)]
        if event.kind == "abort" and also:
            raise _refuse(
                f"{where}: SGLang aborts by prefix, so {event.request!r} would abort {also[0]!r} as well",
                "rename one of the two requests",
            )
        if event.kind in ("pause", "resume"):
            if paused == (event.kind == "pause"):
                raise _refuse(f"{where}: {event.kind}, and the scheduler is {'' if paused else 'not '}paused", "remove it")
            paused = not paused


def without_defaults(value: Any) -> Any:
    """A struct as plain data, without the fields that have their default: a field that is added later changes nothing."""
    if isinstance(value, Struct):
        fields = ((field.encode_name, getattr(value, field.name), field.default) for field in msgspec.structs.fields(value))
        return {name: without_defaults(held) for name, held, default in fields if held != default}
    if isinstance(value, tuple):
        return [without_defaults(held) for held in value]
    return value


def encode_case(case: Case) -> bytes:
    """Canonical JSON: equal cases give equal bytes. Prompts stay on one line each."""
    return msgspec.json.encode(case)


def pretty_case(case: Case) -> str:
    """JSON for people."""
    return msgspec.json.format(encode_case(case), indent=1).decode() + "\n"
