"""Hypothesis strategies for cases: what the worker meets in service, and the edges where it went wrong before.

Requests are drawn by lengths and seeds, never token by token, and chunk boundaries directly. Simple choices come first, so
that shrinking goes to one request, page size 1, one chunk, no events. A `Focus` makes most of the drawn cases share one engine
configuration, since another configuration costs another engine.
"""

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

import msgspec
from hypothesis import strategies as st

from eagletwin.harness.core.case import (
    Case,
    EngineSettings,
    Event,
    GrammarBackend,
    HostPolicy,
    LoraBackend,
    ModelRunner,
    Request,
    Sampling,
    SGLangSettings,
    VLLMSettings,
    WeightPath,
)
from eagletwin.harness.families import RECIPES, family_of
from eagletwin.harness.families.dimensions import DIMENSIONS
from eagletwin.harness.families.dimensions.adaptive import STEPS, WHOLE, with_adaptive_steps
from eagletwin.harness.families.dimensions.dimension import tokens
from eagletwin.harness.families.valid import admits
from eagletwin.reference.sizes import count_candidates, reserved_slots

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


def with_sampling(draw: st.DrawFn, case: Case, *, rejection: bool | None, greedy: bool, retract: bool) -> Case:
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
    engine = msgspec.structs.replace(case.engine, sglang=settings)
    return msgspec.structs.replace(case, requests=requests, events=kept, engine=engine)


# What requests may ask for, each drawn only where it is asked for, after all the rest: in every block that a search draws
# without it, cases are the same. Simplest comes first: a request shrinks to one that asks for nothing.
REQUEST_OPTIONS = {name: dimension for name, dimension in DIMENSIONS.items() if dimension.draw or dimension.draw_case}


@st.composite
def with_request_options(draw: st.DrawFn, cases: st.SearchStrategy[Case], asks: Collection[str]) -> Case:
    """A case of which each request may ask for each of these, names of ASKS."""
    case, wanted = draw(cases), [REQUEST_OPTIONS[name] for name in REQUEST_OPTIONS if name in asks]
    vocabulary, requests = RECIPES[case.model].target.vocab_size, list[Request]()
    for request in case.requests:
        if any(ask.of_prompt for ask in wanted) and draw(st.integers(0, 7)) == 7:
            request = msgspec.structs.replace(request, max_new_tokens=0)
        for ask in wanted:
            if ask.draw is not None:
                request = ask.put(request, ask.draw(draw, request, vocabulary))
        for settle in (ask.settle for ask in REQUEST_OPTIONS.values() if ask.settle is not None):
            request = settle(case, request, vocabulary)
        requests.append(request)
    case = msgspec.structs.replace(case, requests=tuple(requests))
    for ask in reversed(wanted):
        case = case if ask.draw_case is None else ask.draw_case(draw, case, admits)
    return case


UPDATED = tuple(name for name, recipe in RECIPES.items() if family_of(recipe).one_checkpoint)
MODELS = ("llama-tiny", "llama-gqa", "llama-eagle3-full", "llama-eagle3")
# All other recipes are drawn only where they are asked for. Drafts of several layers: a live bug shows in any of them that has
# chunks (ledger entries multi-layer-chunk-tail) and would be found again and again. A new recipe is one of these at first, so
# that no old seed draws another case.
ON_REQUEST = tuple(name for name in RECIPES if name not in MODELS)
NUM_STEPS = (1, 2, 3, 4, 5)
TOPKS = (1, 2, 3, 4, 8, 16)
PAGE_SIZES = (1, 4, 16)
CHUNK_SIZE = 512  # the budget of a prefill batch after the drawn ones: all prompts at once, so that chunks are drawn or absent
PAGES = 16  # of the pool of a model that has a page size of its own, at least
POOL_SIZES = (512, 96, 128)  # slots, for chains; the small ones run out
MAX_DRAFT_TOKENS = 64  # nodes of a verify tree: what the engine recommends at most; the case itself may ask for more
TREE_SIZES = (0, 1, 2, 3, 4)
SMALL_TREE = -1  # fewer nodes than the longest path has: drawn only where it is asked for, as a live bug shows in all of them
MORE_CHUNKS = 120  # of the last size, after those that are drawn one by one: for all prompts of a case, and all of them again
MAX_PROMPT, MAX_NEW_TOKENS, MAX_REQUESTS = 40, 16, 6


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large requests are at most: tokens of a prompt, tokens of an answer, the iteration of an arrival.

    common  about so many tokens most prompts begin with, the same ones; 0: none
    """

    prompt: int = MAX_PROMPT
    new_tokens: int = MAX_NEW_TOKENS
    arrival: int = 8
    common: int = 0


LARGE = Sizes()


def _field(*values: Any, drawn: int | None = None, usual: Any = None) -> Any:
    """A field of Focus.

    values  what it may be, simplest first; drawn: how many of them are drawn where none is asked for, None: all
    usual   its default, if that is not the simplest
    """
    known = {"values": values, "drawn": len(values) if drawn is None else drawn}
    return field(default=values[0] if usual is None else usual, metadata=known)


@dataclass(frozen=True, slots=True)
class Focus:
    """The engine configuration that most cases of a search share.

    tree_size       how large the verify tree is, from 0 (the longest path alone) to 4 (all candidates, or MAX_DRAFT_TOKENS);
                    SMALL_TREE: less than that
    max_total_tokens  slots of the pool; a tree, which takes more of them at a time, gets accordingly more
    threshold       with what part of the target's probability a draft token is accepted at least
    """

    model: str = _field(*MODELS, *ON_REQUEST, drawn=len(MODELS))
    num_steps: int = _field(*NUM_STEPS, usual=3)
    topk: int = _field(*TOPKS)
    tree_size: int = _field(*TREE_SIZES, SMALL_TREE, drawn=len(TREE_SIZES))
    page_size: int = _field(*PAGE_SIZES)
    radix_cache: bool = _field(False, True)
    max_total_tokens: int = _field(*POOL_SIZES)
    max_running_requests: int = _field(8, 2)
    # Near the end of a context live bugs show (row-overflow, indices-overflow); 0: the model's
    context_length: int = _field(0, 64, 32, 16, 8, drawn=1)
    # Each of these is a worker of its own
    update_weights: Literal["", WeightPath] = _field("", *get_args(WeightPath), drawn=1)
    draft_window: int = _field(0, 8, 4, 2, drawn=1)
    draft_sink: int = _field(0, 1, 3, drawn=1)
    threshold: float = _field(1.0, 0.6, 0.3, drawn=1)
    deterministic: bool = _field(False, True, drawn=1)
    mixed_chunks: bool = _field(False, True, drawn=1)
    host_slots: int = _field(0, 256, 96, 48, drawn=1)
    host_policy: HostPolicy = _field(*get_args(HostPolicy), drawn=1)  # noqa: RUF009
    adaptive: bool = _field(False, True, drawn=1)
    plain_decode: bool = _field(False, True, drawn=1)
    attn_dp_size: int = _field(1, 2, drawn=1)
    # vLLM's
    model_runner: ModelRunner = _field(*get_args(ModelRunner), drawn=1)  # noqa: RUF009
    # Drawn with requests that have adapters, or grammars
    max_loras_per_batch: int = _field(8, 2, 1, drawn=1)
    lora_backend: LoraBackend = _field(*get_args(LoraBackend), drawn=1)  # noqa: RUF009
    grammar_backend: GrammarBackend = _field(*get_args(GrammarBackend), drawn=1)  # noqa: RUF009

    @property
    def num_draft_tokens(self) -> int:
        """Nodes of the verify tree; a chain has no choice."""
        least = self.num_steps + 1
        if self.tree_size == SMALL_TREE and self.topk > 1:
            return max(2, self.num_steps)
        most = max(least, min(MAX_DRAFT_TOKENS, count_candidates(self.topk, self.num_steps) + 1))
        return least + (most - least) * self.tree_size // TREE_SIZES[-1] if self.topk > 1 else least

    @property
    def round_slots(self) -> int:
        if self.adaptive:  # as the longest round there may be
            return reserved_slots(self.topk, max(STEPS), self.page_size, max(STEPS) + 1)
        return reserved_slots(self.topk, self.num_steps, self.page_size, self.num_draft_tokens)

    @property
    def pool(self) -> int:
        """Slots, in whole pages: room for as many requests as a chain would have in max_total_tokens."""
        more = 2 * (self.round_slots - self.num_steps - 1) * (self.max_total_tokens // 48)
        return (self.max_total_tokens + more) // self.page_size * self.page_size

    def case(
        self, name: str, requests: tuple[Request, ...], *, chunks: tuple[int, ...] = (), events: tuple[Event, ...] = ()
    ) -> Case:
        return Case(
            name=name,
            model=self.model,
            num_steps=self.num_steps,
            topk=self.topk,
            num_draft_tokens=self.num_draft_tokens if self.topk > 1 else 0,
            page_size=self.page_size,
            chunked_prefill_size=CHUNK_SIZE,
            chunks=chunks,
            requests=requests,
            events=events,
            engine=EngineSettings(
                sglang=SGLangSettings(
                    **{name: getattr(self, name) for name in _SETTINGS},
                    max_total_tokens=self.pool,
                    accept_single=self.threshold,
                    accept_acc=self.threshold,
                    host_pages=self.host_slots // self.page_size,
                    adaptive=WHOLE if self.adaptive else None,
                ),
                vllm=None if self.model_runner == "v2" else VLLMSettings(model_runner=self.model_runner),
            ),
        )


# Field of Focus -> what it may be, simplest first
VALUES: dict[str, tuple[Any, ...]] = {one.name: one.metadata["values"] for one in fields(Focus)}
# Field -> how many of its values are drawn where none is asked for, if not all
DRAWN = {one.name: one.metadata["drawn"] for one in fields(Focus) if one.metadata["drawn"] < len(VALUES[one.name])}
# Fields that the engine's settings have under the same name and with the same value
_SETTINGS = {*VALUES} & {*SGLangSettings.__struct_fields__} - {"max_total_tokens", "adaptive"}


def _possible(drawn: Focus, held: Collection[str]) -> Focus:
    """A draft of several layers has no more steps than layers, trees only if `held` asks for them (they change the output,
    ledger entry multi-layer-topk-path), and those with one node more than steps. Adaptive steps go with chains of single heads.
    New weights go to a model whose target and draft have one checkpoint. A tree that is smaller than its longest path has two
    steps at least. Without a window draft decode has no sink. Of a model with a page size of its own there are chains alone, in
    a pool of several pages."""
    if drawn.update_weights and "model" not in held and drawn.model not in UPDATED:
        drawn = replace(drawn, model=UPDATED[0])
    if drawn.tree_size == SMALL_TREE:  # of one step the smallest tree, two nodes, has all of its longest path
        topk = drawn.topk if "topk" in held else max(drawn.topk, 2)
        drawn = replace(drawn, topk=topk, num_steps=drawn.num_steps if "num_steps" in held else max(drawn.num_steps, 2))
    if RECIPES[drawn.model].target.states and "radix_cache" not in held:
        drawn = replace(drawn, radix_cache=False)  # states are cached every 64 tokens, and a live bug shows in any hit
    if drawn.draft_sink and not drawn.draft_window:
        drawn = replace(drawn, draft_sink=0)
    if drawn.adaptive:  # the engine has it for chains of single heads alone
        model = drawn.model if RECIPES[drawn.model].single_head or "model" in held else MODELS[0]
        drawn = replace(drawn, topk=drawn.topk if "topk" in held else 1, model=model)
    if page := RECIPES[drawn.model].page:
        slots = max(POOL_SIZES[0], PAGES * page)
        drawn = replace(drawn, page_size=page, topk=1, tree_size=TREE_SIZES[0], max_total_tokens=slots)
    layers = RECIPES[drawn.model].mtp_layers
    if not layers:
        return drawn
    topk = drawn.topk if "topk" in held else 1
    return replace(drawn, num_steps=1 + (drawn.num_steps - 1) % layers, topk=topk, tree_size=TREE_SIZES[0])


def _focus_on(value: Any, values: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    """Nearly always `value`; now and then, and whenever shrinking can have it, a simpler one. None: any of them."""
    if value is None:
        return st.sampled_from(values)
    simplest = values[: values.index(value)]
    return st.integers(0, 63).map(lambda n: simplest[n] if n < len(simplest) else value)


@st.composite
def configurations(draw: st.DrawFn, focus: Focus | None = None, held: Collection[str] = ()) -> Focus:
    """An engine configuration: mostly that of `focus`, or any. held: fields that are always those of `focus`."""
    chosen: dict[str, Any] = {}
    for name, values in VALUES.items():
        value = None if focus is None else getattr(focus, name)
        drawn = values[: DRAWN.get(name, len(values))]
        extra = value is not None and value not in drawn
        if name in held or (extra and name == "model"):  # not every recipe can have the rest
            chosen[name] = value
        elif extra:  # smaller cases may be without it
            chosen[name] = draw(_focus_on(value, (*drawn, value)))
        else:
            chosen[name] = drawn[0] if len(drawn) == 1 else draw(_focus_on(value, drawn))
    return _possible(Focus(**chosen), held)


@st.composite
def _lengths(draw: st.DrawFn, page_size: int, most: int) -> int:
    """Any length, and for pages more often one that ends on a page's edge, one before or one after it. As much is drawn for
    every page size, so that a case of pages shrinks to one without."""
    length, edge = draw(st.integers(1, most)), draw(st.integers(0, 5))
    if page_size > 1 and edge > 2:
        pages = max(1, round(length / page_size))
        length = pages * page_size + edge - 4
    return min(max(length, 1), most)


@st.composite
def requests(
    draw: st.DrawFn, configuration: Focus, name: str, earlier: tuple[Request, ...] = (), sizes: Sizes = LARGE
) -> Request:
    """One request, which may begin like one of the `earlier` ones."""
    vocabulary = RECIPES[configuration.model].target.vocab_size
    page = configuration.page_size
    # what the engine reserves: room for two rounds ahead, in whole pages
    room = configuration.pool - 2 * configuration.round_slots - 2 * page
    context, longest = configuration.context_length, sizes.prompt
    if context:  # what the engine admits without cutting it down
        room, longest = min(room, context - 2), context - 7
    max_new_tokens = draw(st.integers(1, min(sizes.new_tokens, room - 1)))
    most = min(longest, room - max_new_tokens)
    shared: tuple[int, ...] = ()
    if like := draw(st.integers(0, len(earlier))):  # drawn for the first one too: what is left when that is taken away fits
        prompt = earlier[like - 1].prompt
        shared = prompt[: draw(_lengths(page, len(prompt)))][: most - 1]
    if sizes.common and draw(st.integers(0, 3)):
        shared = tokens(0, sizes.common + draw(st.integers(-1, 6)), vocabulary)[: most - 1]
    own = draw(_lengths(page, most - len(shared)))
    if context and draw(st.booleans()):  # up to the end of the context
        own = most - len(shared)
    stops = draw(st.sampled_from((0, 0, 0, 0, 12)))
    return Request(
        id=name,
        prompt=shared + tokens(draw(st.integers(0, 255)), own, vocabulary),
        max_new_tokens=max_new_tokens,
        arrive=draw(st.integers(0, sizes.arrival)),
        stop=tuple(sorted(set(tokens(1, stops, vocabulary)))),
    )


@st.composite
def _slots(
    draw: st.DrawFn, configuration: Focus, name: str, earlier: tuple[Request, ...], sizes: Sizes
) -> tuple[Request, bool]:
    """A request, and whether the case has it. A request that is left out is drawn all the same, so that shrinking takes
    it away and leaves all others, and what happens to them, as they are."""
    there = draw(st.integers(0, 7)) > 0
    return draw(requests(configuration, name, earlier, sizes)), there


def _first_decode_iterations(made: tuple[Request, ...], chunks: tuple[int, ...]) -> dict[str, int]:
    """By request about the iteration in which it begins to decode: as if each prefill batch held one request's chunk."""
    sizes, iteration, begins = iter(chunks), 0, {}
    for request in sorted(made, key=lambda request: request.arrive):
        iteration, left = max(iteration, request.arrive), len(request.prompt)
        while left > 0:
            iteration, left = iteration + 1, left - next(sizes, CHUNK_SIZE)
        begins[request.id] = iteration
    return begins


@st.composite
def _events(draw: st.DrawFn, near: Sequence[Request], begins: dict[str, int]) -> tuple[Event, ...]:
    """Each falls `near` a request: within a few iterations of its arrival, or of when it `begins` to decode. There is something
    to disturb then."""
    kinds = st.sampled_from(("abort", "retract", "pause", "flush", "retract", "abort"))
    one = st.tuples(st.sampled_from(near), st.integers(0, 6), kinds, st.booleans())
    drawn = [
        # an abort before the iteration of its request's arrival leaves nothing of it
        ((begins[request.id] if decoding else request.arrive) + max(later, int(kind == "abort")), kind, request.id)
        for request, later, kind, decoding in draw(st.lists(one, min_size=1, max_size=4))
    ]
    events, paused = [], False
    for at, kind, name in sorted(drawn):
        if kind == "pause":  # every second one of them ends a pause
            events.append(Event(at=at, kind="resume" if paused else "pause"))
            paused = not paused
        elif kind == "abort":
            events.append(Event(at=at, kind="abort", request=name))
        else:
            events.append(Event(at=at, kind="retract" if kind == "retract" else "flush"))
    return tuple(events)


def cases(
    focus: Focus | None = None,
    *,
    held: Collection[str] = (),
    max_requests: int = MAX_REQUESTS,
    events: bool = True,
    sampling: Kind | None = None,
    asks: Collection[str] = (),
) -> st.SearchStrategy[Case]:
    """Valid cases.

    focus     the configuration that most have, or any; held: fields of it that all have
    events    whether aborts, retractions, … may happen
    sampling  None: greedy. Else at least one request of each case samples: `target`, of the target alone; `rejection`, of the
              draft too; `any`, of either
    asks      what their requests may ask for beside: keys of request_options.ASKS

    Raises ValueError for rejection sampling of a focus that cannot have it: it needs a chain, and one vocabulary.
    """
    options: dict[str, Any] = {"held": held, "max_requests": max_requests, "events": events}
    if asks:
        return with_request_options(cases(focus, sampling=sampling, **options), asks)
    if sampling is None:
        return greedy_cases(focus, **options)
    if sampling not in get_args(Kind):
        raise ValueError(f"sampling={sampling!r}: use one of {', '.join(get_args(Kind))}, or None")
    if sampling != "rejection":
        return sampling_cases(focus, rejection=None if sampling == "any" else False, **options)
    if focus is not None and rejects(focus) != focus:
        raise ValueError(
            "sampling='rejection' needs topk 1 and a draft that has the target's vocabulary; the focus has "
            f"topk {focus.topk} and {focus.model}"
        )
    # without a focus any configuration that can have it: rejects() changes one that cannot
    foci = configurations().map(rejects) if focus is None else st.just(focus)
    return foci.flatmap(lambda one: sampling_cases(one, rejection=True, **{**options, "held": {*held, "topk", "model"}}))


@st.composite
def greedy_cases(
    draw: st.DrawFn,
    focus: Focus | None = None,
    *,
    held: Collection[str] = (),
    max_requests: int = MAX_REQUESTS,
    events: bool = True,
    sizes: Sizes = LARGE,
) -> Case:
    configuration = draw(configurations(focus, held))
    drawn: tuple[Request, ...] = ()
    present: list[bool] = []
    for name in "abcdefghijklmnopqrstuvwxyz"[: draw(st.integers(1, max_requests))]:
        request, there = draw(_slots(configuration, name, drawn, sizes))
        drawn += (request,)
        present.append(there)
    made = tuple(itertools.compress(drawn, present)) or drawn[:1]
    page = configuration.page_size
    unit = max(page, sizes.common // 4)  # with states in the cache some chunks come to where it keeps one
    chunks = tuple(unit * units for units in draw(st.lists(st.integers(1, 6), max_size=12)))
    # in every second case more of the last size: what is prefilled again, after a retraction, comes in chunks as well
    chunks += chunks[-1:] * max(0, draw(st.integers(-MORE_CHUNKS, MORE_CHUNKS)))
    if configuration.mixed_chunks:  # no server's chunk is empty beside requests that run (families/valid.py)
        enough = -(-len(made) // page) * page
        chunks = tuple(itertools.accumulate(chunks, lambda before, size: max(size, min(before, enough))))
    drawn_events: tuple[Event, ...] = ()
    if events and draw(st.integers(0, 3)):
        slots = enumerate(zip(drawn, present, strict=True))
        near = [request if there else made[number % len(made)] for number, (request, there) in slots]
        drawn_events = draw(_events(near, _first_decode_iterations(made, chunks)))
    case = configuration.case("generated", made, chunks=chunks, events=drawn_events)
    if configuration.attn_dp_size > 1:
        ranks = {request.id: draw(st.integers(0, configuration.attn_dp_size - 1)) for request in drawn}
        made = tuple(msgspec.structs.replace(request, dp_rank=ranks[request.id]) for request in made)
        case = msgspec.structs.replace(case, requests=made)
    return with_adaptive_steps(draw, case) if configuration.adaptive else case


@st.composite
def sampling_cases(
    draw: st.DrawFn,
    /,
    focus: Focus | None = None,
    *,
    rejection: bool | None = None,
    greedy: bool = True,
    retract: bool = True,
    **others: Any,
) -> Case:
    """A valid case of which at least one request samples (sampling.sampled). others: as greedy_cases() takes them."""
    case = draw(greedy_cases(focus, **others))
    return with_sampling(draw, case, rejection=rejection, greedy=greedy, retract=retract)


def rejects(focus: Focus, **changed: Any) -> Focus:
    """The configuration with what rejection sampling must have: a chain, and a draft of the target's vocabulary."""
    model = focus.model if RECIPES[focus.model].samples_drafts else "llama-tiny"
    return replace(focus, topk=1, model=model, **changed)
