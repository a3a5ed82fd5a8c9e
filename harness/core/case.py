"""A case: what to do, as plain data (JSON). Read from strangers, so every field has a type and a bound, and none is a path.

A neutral core (model recipe, requests, events, num_steps, topk, num_draft_tokens, page and chunk sizes) and one block of
settings for each engine. It never holds code. `exercises` names what a hand-made case is for; the judge says `unknown` if that
did not happen.
"""

import re
from collections.abc import Container, Mapping, Sequence
from itertools import groupby, takewhile
from math import inf
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

SCHEMA = 1
MAX_FILE_BYTES = 1 << 20  # the largest valid case, 64 prompts of 2,048 tokens, is some 700 kB of JSON
_RUN = 5  # as many equal numbers in a row are printed as one
MOST_LETTERS, MOST_REQUESTS = 64, 64  # of a name, and of a case

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
NoName = Annotated[str, Meta(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,63})?\Z")]  # a name, or none
Token = Annotated[int, Meta(ge=0, lt=1 << 20)]


# By which path a worker is given other weights: from a folder; tensors in a message, each or all of them as one; tensors that
# another process broadcasts, each or all of them as one
WeightPath = Literal["disk", "tensor", "tensor_bucket", "distributed", "distributed_bucket"]
# Kernels that SGLang has for adapters, the first of which it takes unless another is named
LoraBackend = Literal["csgmv", "triton", "torch_native"]
# Backends of attention that run on a CPU
AttentionBackend = Literal["triton", "fa3"]
# What keeps requests to their grammars, the first of which SGLang takes unless another is named
GrammarBackend = Literal["xgrammar", "llguidance"]

# Which of vLLM's model runners
ModelRunner = Literal["v2", "v1"]

# When a hierarchical cache writes rows to the host: when they are cached, when they were used twice, or when they are evicted
HostPolicy = Literal["write_through", "write_through_selective", "write_back"]


class Printed(Struct, frozen=True):
    """Plain data whose repr is the Python that makes it: without the fields that have their default."""

    def __repr__(self) -> str:
        fields = ((field.name, getattr(self, field.name), field.default) for field in msgspec.structs.fields(self))
        given = (f"{name}={_format_value(value)}" for name, value, usual in fields if value != usual)
        return f"{type(self).__name__}({', '.join(given)})"


def _format_value(value: object) -> str:
    numbers = isinstance(value, tuple) and all(type(one) is int for one in value)
    return in_runs(value) if numbers else repr(value)


def in_runs(numbers: Any) -> str:
    """A tuple or list of numbers as Python, in which many equal ones in a row are short: `[8, 4] + [8] * 108`."""
    kind, parts, rest = type(numbers), list[str](), list[int]()
    for run in (list(equal) for _, equal in groupby(numbers)):
        if len(run) < _RUN:
            rest += run
            continue
        parts += [repr(kind(rest))] if rest else []
        parts.append(f"{kind(run[:1])!r} * {len(run)}")
        rest = []
    return " + ".join([*parts, repr(kind(rest))] if rest or not parts else parts)


class Sampling(Printed, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a request samples: of softmax(logits / temperature), the top_k largest (0: all), of these the top_p largest mass, and
    of these what has at least min_p of the largest one's probability.

    seed: what its coins are hashed from, where `engine.sglang.deterministic` has them hashed and not drawn.
    """

    # below a hundredth a float32 softmax of these models' logits has one token left
    temperature: Annotated[float, Meta(ge=0.01, le=100)] = 1.0
    top_k: Annotated[int, Meta(ge=0, lt=1 << 20)] = 0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    seed: Annotated[int, Meta(ge=0, lt=1 << 62)] | None = None


class Processor(Printed, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A custom logit processor: one of a fixed set, which changes the logits of each token by the token and `seed` alone.

    add     adds a number from -4 to 4 to each
    forbid  a quarter of the vocabulary is never emitted
    """

    kind: Literal["add", "forbid"] = "add"
    seed: Annotated[int, Meta(ge=0, lt=1 << 16)] = 0


class Bias(Printed, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is added to the logit of one token."""

    token: Token
    value: Annotated[float, Meta(ge=-100, le=100)]


class Logprobs(Printed, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of which tokens a request wants to be told the logarithms of their probabilities: of each that it is sent; and at each
    of these places of the `top` best, and of `tokens`.

    start  the first place of the prompt for which it wants the same: the prompt's token there, given those before; -1: none
    """

    start: Annotated[int, Meta(ge=-1, le=2048)] = -1
    top: Annotated[int, Meta(ge=0, le=64)] = 0
    tokens: Annotated[tuple[Token, ...], Meta(max_length=64)] = ()


class Penalties(Printed, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a request has the logits of tokens changed that it was sent already: `frequency` is subtracted for each time,
    `presence` once; then what is above 0 is divided by `repetition`, and what is below is multiplied by it."""

    frequency: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    presence: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    repetition: Annotated[float, Meta(gt=0, le=2)] = 1.0


class Grammar(Printed, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which texts a request may be answered with. A token's text follows from its number (core/grammar.py).

    rules  of texts over the letters a to d, with ( ) | * + ?; capitals stand for rules: A for the first, the answer's own
    kind   regex: one rule without capitals, which the engine is given as a regular expression; ebnf: it is given a grammar
    """

    kind: Literal["regex", "ebnf"] = "regex"
    rules: Annotated[tuple[Annotated[str, Meta(pattern=r"^[a-dA-H()|*+?]{1,256}\Z")], ...], Meta(min_length=1, max_length=8)]


class Adapter(Printed, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A low-rank adapter (LoRA) of the target: its numbers and its scale follow from `seed` (families/adapters.py).

    on  which projections of each layer it changes: those of attention, those of the MLP, or all
    """

    seed: Annotated[int, Meta(ge=0, lt=1 << 16)] = 0
    rank: Annotated[int, Meta(ge=1, le=8)] = 1
    on: Literal["all", "attention", "mlp"] = "all"


class Request(Printed, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request. `arrive` is the scheduler iteration, from 0, before which it is handed in.

    stop  tokens of which the first emitted one ends the request, as does the recipe's end-of-sequence token then; with
          none of them, only max_new_tokens does
    sampling  absent: greedy
    stream  tokens are sent as they come, and not all at the end
    logit_bias  one entry a token
    processor  absent: none
    logprobs  absent: none
    penalties  absent: none
    min_new_tokens  until it was sent so many, no token may end it
    hidden_states  which states of the target it is given: "" none, "last" that of the last token, "all" those of the prompt
          and of each token
    grammar  absent: none
    session  the streaming session that it is a turn of: its prompt goes on behind the prompts and answers of the session's
             earlier requests, and it is handed in when the one before has ended, if that is after `arrive`. "": of none
    n  so many answers are wanted: the scheduler is sent other requests in its place (core/case.py)
    after  it is handed in when this request has ended, if that is after `arrive`. "": it waits for none
    adapter  the target's weights are changed by it; the draft's never are. absent: they are as they are
    dp_rank  the rank of DP attention that serves it (engine.sglang.attn_dp_size)
    """

    id: Name
    prompt: Annotated[tuple[Token, ...], Meta(min_length=1, max_length=2048)]
    max_new_tokens: Annotated[int, Meta(ge=0, le=512)]
    arrive: Annotated[int, Meta(ge=0, le=1000)] = 0
    stop: Annotated[tuple[Token, ...], Meta(max_length=64)] = ()
    sampling: Sampling | None = None
    stream: bool = False
    logit_bias: Annotated[tuple[Bias, ...], Meta(max_length=64)] = ()
    processor: Processor | None = None
    logprobs: Logprobs | None = None
    penalties: Penalties | None = None
    hidden_states: Literal["", "last", "all"] = ""
    min_new_tokens: Annotated[int, Meta(ge=0, le=512)] = 0
    grammar: Grammar | None = None
    session: NoName = ""
    n: Annotated[int, Meta(ge=1, le=16)] = 1
    after: NoName = ""
    adapter: Adapter | None = None
    dp_rank: Annotated[int, Meta(ge=0, le=3)] = 0

    @property
    def penalized(self) -> bool:
        """Whether its logits depend on what it was sent before."""
        return self.penalties is not None or self.min_new_tokens > 0


class Event(Printed, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that happens to the scheduler before iteration `at` (from 0), after that iteration's arrivals.

    abort    the client of `request` hangs up; step: while the step-th batch runs that has the request, after the worker was
             given it and before anybody looks at what it gave. `at` is 0 then; step 0: before iteration `at`
    retract  all running requests lose their slots and go back to the queue
    pause    nothing is scheduled until the next resume; one that never comes comes after the last event
    flush    empty the prefix cache; SGLang refuses while anything runs
    close    `session` ends, when its request that runs has ended; a later request of it opens it anew
    """

    at: Annotated[int, Meta(ge=0, le=1000)]
    kind: Literal["abort", "retract", "pause", "resume", "flush", "close"]
    request: NoName = ""
    step: Annotated[int, Meta(ge=0, le=1000)] = 0
    session: NoName = ""


class Tier(Printed, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many draft steps a decode batch of at least `batch` requests may have, up to the next tier."""

    batch: Annotated[int, Meta(ge=1, le=64)]
    steps: Annotated[tuple[Annotated[int, Meta(ge=0, le=16)], ...], Meta(min_length=1, max_length=17)]


class Adaptive(Printed, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How SGLang chooses the number of draft steps of each round, from how many drafts were accepted so far.

    tiers     each with a choice and an average of its own; a batch smaller than all of them has the first
    alpha     share of the newest round in the average of accepted drafts
    interval  rounds from one decision to the next; warmup: rounds before the first of these
    up, down  what is added to the thresholds above which it chooses more steps, and below which fewer
    ceiling   more than 0: no choice to go on with, or to go down to, more steps than this many times the average
    """

    tiers: Annotated[tuple[Tier, ...], Meta(min_length=1, max_length=8)]
    alpha: Annotated[float, Meta(gt=0, le=1)] = 0.2
    interval: Annotated[int, Meta(ge=1, le=1000)] = 5
    warmup: Annotated[int, Meta(ge=0, le=1000)] = 10
    up: Annotated[float, Meta(ge=-16, le=16)] = 0.0
    down: Annotated[float, Meta(ge=-16, le=16)] = -0.25
    ceiling: Annotated[float, Meta(ge=0, le=16)] = 0.0

    @property
    def choices(self) -> frozenset[int]:
        """All numbers of steps that a round may have."""
        return frozenset(steps for tier in self.tiers for steps in tier.steps)


class SGLangSettings(Printed, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What only SGLang has: `max_total_tokens` is the size of the KV pool in slots; `context_length` 0: the recipe's.

    update_weights: the worker starts with other weights, and is given the recipe's by this path before the first request.
    rejection_sampling: --speculative-use-rejection-sampling: the draft samples too; else only the target does.
    accept_single, accept_acc: --speculative-accept-threshold-single, -acc: below 1, more drafts of a tree are accepted.
    deterministic: --enable-deterministic-inference: coins are hashed from the requests' seeds.
    random_seed: what coins that are drawn begin from.
    draft_window, draft_sink: --speculative-draft-window-size, -sink-size: draft decode reads of the committed rows the last
    `draft_window` and the first `draft_sink` alone; an EAGLE-3 head sees so many rows in all its forwards. 0: all of them.
    mixed_chunks: --enable-mixed-chunk: a prefill batch gives each request that runs one token as well.
    host_pages: --enable-hierarchical-cache: so many pages of the host's memory take what the prefix cache must give up, and
    `host_policy` (--hicache-write-policy) says when it is written there. 0: no such cache.
    adaptive: --speculative-adaptive: the number of draft steps changes between rounds, from num_steps on. None: it does not.
    plain_decode: a second engine of the same SGLang, without speculative decoding, says of each token of the greedy requests
    which it would have sent in its place (docs/explanation/plain-decode.md).
    max_loras_per_batch, lora_backend: --max-loras-per-batch, --lora-backend: how many adapters may be in one batch, where none
    is one more, and the kernels that apply them. Of no effect without adapters.
    grammar_backend: --grammar-backend: what keeps requests to their grammars. Of no effect without grammars.
    graphs, prefill_graphs: --cuda-graph-bs-decode, -prefill: batch sizes and token counts for which CUDA graphs are captured,
    ascending; none: without. overlap: without --disable-overlap-schedule. cuda_branches: SGLang takes the branches that it
    takes for tensors on a GPU. attention_backend: --attention-backend, of target and draft. All five are a CPU's; on a GPU
    the options of the run say so.
    attn_dp_size: --attn-dp-size, with as many ranks: each has attention, a KV pool and a scheduler for its own requests
    (their `dp_rank`), and all share the other layers.
    """

    radix_cache: bool = False
    max_running_requests: Annotated[int, Meta(ge=1, le=64)] = 8
    max_total_tokens: Annotated[int, Meta(ge=64, le=65536)] = 1024
    context_length: Annotated[int, Meta(ge=0, le=4096)] = 0
    update_weights: Literal["", WeightPath] = ""
    rejection_sampling: bool = False
    accept_single: Annotated[float, Meta(gt=0, le=1)] = 1.0
    accept_acc: Annotated[float, Meta(gt=0, le=1)] = 1.0
    deterministic: bool = False
    random_seed: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0
    draft_window: Annotated[int, Meta(ge=0, le=4096)] = 0
    draft_sink: Annotated[int, Meta(ge=0, le=4096)] = 0
    mixed_chunks: bool = False
    host_pages: Annotated[int, Meta(ge=0, le=4096)] = 0
    host_policy: HostPolicy = "write_through"
    adaptive: Adaptive | None = None
    plain_decode: bool = False
    max_loras_per_batch: Annotated[int, Meta(ge=1, le=8)] = 8
    lora_backend: LoraBackend = "csgmv"
    grammar_backend: GrammarBackend = "xgrammar"
    graphs: Annotated[tuple[Annotated[int, Meta(ge=1, le=64)], ...], Meta(max_length=8)] = ()
    prefill_graphs: Annotated[tuple[Annotated[int, Meta(ge=1, le=8192)], ...], Meta(max_length=8)] = ()
    overlap: bool = False
    cuda_branches: bool = False
    attention_backend: AttentionBackend = "triton"
    attn_dp_size: Annotated[int, Meta(ge=1, le=4)] = 1


class VLLMSettings(Printed, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What only vLLM has, by the names of its configuration. `num_gpu_blocks` is the size of the KV pool in pages, beside the
    null block.

    async_scheduling: a step is scheduled and launched before the output of the one before is looked at: vLLM's default.
    eagle_config: an EAGLE-3 head names its layers in `eagle_config` alone, and not at the top of its configuration, too.
    disable_lookahead_block_hashes: the key of a block does not cover the token after it, and a hit drops its last block.
    draft_sample_method: whether the drafter takes the best token, or draws one at the request's temperature.
    model_runner: VLLM_USE_V2_MODEL_RUNNER, which of its two runners it is.
    max_model_len: rows of the longest request; 0: as many as the pool and the recipe have.
    whole_budget: chunked_prefill_size and chunks are the budget of all tokens of a step, as on a server, where drafts that it
    has no room for are not verified; else of its prefills, and what the requests need that run comes on top.
    """

    model_runner: ModelRunner = "v2"
    max_num_seqs: Annotated[int, Meta(ge=1, le=64)] = 8
    num_gpu_blocks: Annotated[int, Meta(ge=4, le=4096)] = 64
    max_model_len: Annotated[int, Meta(ge=0, le=65536)] = 0
    enable_prefix_caching: bool = False
    disable_lookahead_block_hashes: bool = False
    eagle_config: bool = False
    whole_budget: bool = False
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    async_scheduling: bool = False


class EngineSettings(Printed, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A block for each engine. With one of vLLM the case is vLLM's."""

    sglang: SGLangSettings = SGLangSettings()
    vllm: VLLMSettings | None = None


class Case(Printed, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an engine is to do. Sizes are in tokens; `chunked_prefill_size` is a whole number of pages."""

    schema: int = SCHEMA
    name: Name
    model: Name
    requests: Annotated[tuple[Request, ...], Meta(min_length=1, max_length=MOST_REQUESTS)]
    # 16 steps: past the longest chain anyone serves; each step costs the engine one forward
    num_steps: Annotated[int, Meta(ge=1, le=16)]
    topk: Annotated[int, Meta(ge=1, le=64)] = 1
    # nodes that the target verifies in a round, the bonus token among them; 0: as many as the longest path, num_steps + 1
    num_draft_tokens: Annotated[int, Meta(ge=0, le=1024)] = 0
    page_size: Annotated[int, Meta(ge=1, le=256)] = 1
    chunked_prefill_size: Annotated[int, Meta(ge=1, le=8192)] = 64
    # sizes of the first prefill batches; chunked_prefill_size holds after the last
    chunks: Annotated[tuple[Annotated[int, Meta(ge=1, le=8192)], ...], Meta(max_length=1024)] = ()
    events: Annotated[tuple[Event, ...], Meta(max_length=64)] = ()
    exercises: tuple[str, ...] = ()
    engine: EngineSettings = EngineSettings()

    @property
    def vllm(self) -> VLLMSettings:
        return self.engine.vllm or VLLMSettings()

    @property
    def prefix_cache(self) -> bool:
        """Whether the engine that runs it keeps rows for other requests."""
        return self.engine.sglang.radix_cache or self.vllm.enable_prefix_caching

    @property
    def verify_nodes(self) -> int:
        """Nodes that the target verifies in a round, the bonus token and the drafts: num_draft_tokens, or what 0 stands for."""
        return self.num_draft_tokens or self.num_steps + 1

    @property
    def most_steps(self) -> int:
        """Draft steps of the longest round that it may have."""
        adaptive = self.engine.sglang.adaptive
        return self.num_steps if adaptive is None else max(self.num_steps, *adaptive.choices)

    @property
    def most_nodes(self) -> int:
        """Nodes that the target verifies in such a round."""
        return self.verify_nodes if self.engine.sglang.adaptive is None else self.most_steps + 1

    @property
    def rejection_sampling(self) -> bool:
        """Whether drafts of requests that sample are drawn, and accepted by their own probabilities as well."""
        return self.engine.sglang.rejection_sampling or self.vllm.draft_sample_method == "probabilistic"

    @property
    def samples(self) -> bool:
        """Whether anything in it depends on chance."""
        return self.engine.sglang.rejection_sampling or any(request.sampling is not None for request in self.requests)

    @property
    def processes(self) -> bool:
        """Whether a request has a custom logit processor, which SGLang takes only where it was started for them."""
        return any(request.processor is not None for request in self.requests)

    @property
    def gives_states(self) -> Literal["", "last", "all"]:
        """The most that a request is given of hidden states, for which SGLang wants to be started."""
        wanted = {request.hidden_states for request in self.requests}
        return "all" if "all" in wanted else "last" if "last" in wanted else ""

    @property
    def constrains(self) -> bool:
        """Whether a request has a grammar, for which SGLang needs a backend."""
        return any(request.grammar is not None for request in self.requests)

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """The adapters that requests have, each once, in order; for any, SGLang is started in another way."""
        return tuple(dict.fromkeys(request.adapter for request in self.requests if request.adapter is not None))

    @property
    def sessions(self) -> tuple[str, ...]:
        """The streaming sessions that requests are of, for which SGLang is started in another way; sorted."""
        return tuple(sorted({request.session for request in self.requests if request.session}))

    def request(self, name: str) -> Request:
        return next(one for one in self.requests if one.id == name)

    def sampling_of(self, request: str) -> Sampling | None:
        """How this request samples; None: it is greedy, as one that takes the best of all tokens is."""
        sampling = self.request(request).sampling
        return None if sampling is None or sampling.top_k == 1 else sampling

    @property
    def told_plainly(self) -> tuple[str, ...]:
        """The requests of which plain decode is asked: greedy ones, of no session, that are to be sent something."""
        if not self.engine.sglang.plain_decode:
            return ()
        answered = (one for one in self.requests if one.max_new_tokens and not one.session)
        return tuple(one.id for one in answered if self.sampling_of(one.id) is None)

    def draws_drafts(self, request: str) -> bool:
        """Whether the draft draws this request's tokens. Those of a greedy one are the best: any other would be refused."""
        return self.rejection_sampling and self.sampling_of(request) is not None

    def configuration(self) -> "Case":
        """This case without what differs from case to case on one engine: equal configurations share an engine process.

        Cases that sample do not share one with those that do not: on a CPU the worker is changed for them. Nor do those with
        logit processors, hidden states, grammars, sessions or adapters, for which SGLang is started in another way.
        """
        nothing = Request(
            id="none",
            prompt=(0,),
            max_new_tokens=1,
            sampling=Sampling() if self.samples else None,
            processor=Processor() if self.processes else None,
            hidden_states=self.gives_states,
            grammar=Grammar(rules=("a*",)) if self.constrains else None,
            session="none" if self.sessions else "",
            adapter=Adapter() if self.adapters else None,
        )
        adaptive = self.engine.sglang.adaptive
        if adaptive is not None:  # which steps there may be is the engine's; how one is chosen begins anew with each case
            adaptive = Adaptive(tiers=(Tier(batch=1, steps=tuple(sorted(adaptive.choices))),))
        settings = msgspec.structs.replace(self.engine.sglang, random_seed=0, adaptive=adaptive)
        if not self.adapters:  # nothing reads these
            settings = msgspec.structs.replace(settings, max_loras_per_batch=8, lora_backend="csgmv")
        if not self.constrains:
            settings = msgspec.structs.replace(settings, grammar_backend="xgrammar")
        engine = EngineSettings(sglang=settings, vllm=self.engine.vllm)
        return msgspec.structs.replace(
            self, name="configuration", requests=(nothing,), chunks=(), events=(), exercises=(), engine=engine
        )

    @property
    def last_arrival(self) -> int:
        """The last scheduler iteration before which a request or event reaches the scheduler."""
        return max([0, *(request.arrive for request in self.requests), *(event.at for event in self.events)])


def without_defaults(value: Any) -> Any:
    """A struct as plain data, without the fields that have their default: a field that is added later changes nothing."""
    if isinstance(value, Struct):
        fields = ((field.encode_name, getattr(value, field.name), field.default) for field in msgspec.structs.fields(value))
        return {name: without_defaults(own) for name, own, default in fields if own != default}
    if isinstance(value, tuple):
        return [without_defaults(part) for part in value]
    return value


_NUMBERS = re.compile(r"\[\n[-+.,\de\s]*\]")


def encode_case(case: Case) -> bytes:
    """Canonical JSON: equal cases give equal bytes. Prompts stay on one line each."""
    return msgspec.json.encode(case)


def pretty_case(case: Case) -> str:
    """JSON for people: without what has its default, and a list of numbers on one line."""
    data = msgspec.json.encode({"schema": case.schema, **without_defaults(case)})
    return (
        _NUMBERS.sub(
            lambda found: " ".join(found[0].split()).replace("[ ", "[").replace(" ]", "]"),
            msgspec.json.format(data, indent=1).decode(),
        )
        + "\n"
    )


# Several samples of one prompt (`n`): the requests that the scheduler is sent for one request, as SGLang's tokenizer process
# sends them (`TokenizerManager._handle_batch_request`).
#
# First one of the same prompt that is to be sent no token: it leaves the prompt in the prefix cache. When it has ended come `n`
# requests of the same prompt, all at once, each with all that was asked.


LONGEST = "16"  # of the numbers that are added to a request's id


def expand_samples(case: Case) -> Case:
    """The case as the scheduler sees it: without `n`."""
    if not several(case):
        return case
    return replace(case, requests=tuple(sent for request in case.requests for sent in sent_for(request)))


def several(case: Case) -> tuple[Request, ...]:
    return tuple(request for request in case.requests if request.n > 1)


def sent_for(request: Request) -> list[Request]:
    """The requests that the scheduler is sent for one.

    SGLang gives each an id of its own, at random. Here they are told apart by a number, from 0 for the first on, whose
    min_new_tokens the scheduler makes as small as its max_new_tokens."""
    if request.n == 1:
        return [request]
    first = replace(request, id=f"{request.id}.0", n=1, max_new_tokens=0, min_new_tokens=0, stream=False)
    return [first, *(replace(request, id=f"{request.id}.{number + 1}", n=1, after=first.id) for number in range(request.n))]


# DP attention: what one rank has of a case.


def share_of_rank(case: Case, rank: int) -> Case:
    """The case with the requests of this rank of DP attention, and the events that are not of another rank's; as it is, without
    DP attention. A pause that nothing ends lasts until all that comes for any rank has come."""
    if case.engine.sglang.attn_dp_size == 1:
        return case
    requests = tuple(request for request in case.requests if request.dp_rank == rank)
    ids = {"", *(sent.id for request in requests for sent in sent_for(request))}
    pauses = [event.kind for event in case.events if event.kind in ("pause", "resume")]
    ends = (Event(at=case.last_arrival + 1, kind="resume"),) if pauses[-1:] == ["pause"] else ()
    return replace(case, requests=requests, events=(*(event for event in case.events if event.request in ids), *ends))


# What a request of a streaming session is asked: all that was said in the session before, and its own prompt behind it.


def whole_prompts(case: Case, answers: Mapping[str, Sequence[int]], opening: Container[str]) -> dict[str, tuple[int, ...]]:
    """By request of a session: every token that stands before its answer.

    answers  what requests were sent that ended by themselves: of an aborted one the session keeps nothing, its prompt neither
    opening  requests with which a session begins anew
    """
    said, prompts = dict[str, tuple[int, ...]](), dict[str, tuple[int, ...]]()
    for request in case.requests:
        if not request.session:
            continue
        before = () if request.id in opening else said.get(request.session, ())
        said[request.session] = before
        prompts[request.id] = whole = before + request.prompt
        if request.id in answers:
            said[request.session] = (*whole, *answers[request.id])
    return prompts


def before(case: Case, name: str) -> str:
    """The request of the same session that comes before this one; "": there is none, or it is of no session."""
    return next((request.id for request in reversed(_earlier_turns(case, name))), "")


def most_before(case: Case, name: str) -> int:
    """Tokens that can stand before a request's own prompt: of all earlier ones of its session, with their answers."""
    return sum(len(request.prompt) + request.max_new_tokens for request in _earlier_turns(case, name))


def _earlier_turns(case: Case, name: str) -> list[Request]:
    session = next((one.session for one in case.requests if one.id == name), "")  # a live case gets its requests later
    earlier = takewhile(lambda request: request.id != name, case.requests)
    return [request for request in earlier if session and request.session == session]


# What a request has added to the logits of its tokens: by its logit_bias, and by its custom logit processor.

_STEPS = 33  # of a quarter each, from -4 to 4


def biases(request: Request) -> dict[int, float]:
    """By token."""
    return {bias.token: bias.value for bias in request.logit_bias}


def processor_bias(processor: Processor, vocabulary: int) -> list[float]:
    hashed = [_hash(token, processor.seed) for token in range(vocabulary)]
    if processor.kind == "forbid":
        return [-inf if number % 4 == 0 else 0.0 for number in hashed]
    return [(number % _STEPS - _STEPS // 2) / 4 for number in hashed]


def logit_changes(request: Request, vocabulary: int) -> list[float] | None:
    """What is added in all, by token; None: nothing."""
    if not request.logit_bias and request.processor is None:
        return None
    own = [0.0] * vocabulary if request.processor is None else processor_bias(request.processor, vocabulary)
    for token, value in biases(request).items():
        own[token] += value
    return own


def _hash(token: int, seed: int) -> int:
    """Some 16 bits that look drawn, the same everywhere."""
    number = (token + 1) * 2654435761 + (seed + 1) * 2246822519
    number = (number ^ number >> 15) * 3266489917 % 2**32
    return (number ^ number >> 13) >> 8
