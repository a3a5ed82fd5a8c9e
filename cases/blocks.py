"""What a search draws: blocks of cases. Those of one block share an engine configuration, and all blocks together have every
recipe and every option of a generated case, each with a share.

Nearly all faults show in one or two requests of a few tokens, so most blocks have small cases; a window that ends and large
pages need longer prompts, and a pool that runs out needs large cases. A recipe that is added comes by itself, as does a field
of `Focus`: a block's options are read from RECIPES and from the tables of strategies.py, and an option that is drawn only on
request is requested here. Of some blocks the requests meet: they are prefilled together, fill the pool, or come back.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from msgspec.structs import replace as replace_fields

from eagletwin.harness.core.case import Case, EngineSettings, Event, ModelRunner, Request, Sampling
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.run_spec import DEFAULT_ENGINE, Engine, Mode
from eagletwin.harness.families import RECIPES, family_of, runs_on
from eagletwin.harness.families.adapters import takes_adapters
from eagletwin.harness.families.dimensions import DIMENSIONS
from eagletwin.harness.families.dimensions.cache import keeps_on_host
from eagletwin.harness.families.dimensions.dimension import Dimension, get, put, tokens, with_requests, with_settings
from eagletwin.harness.families.dimensions.session import keeps_sessions
from eagletwin.harness.families.mimo_v2 import ENDING
from eagletwin.harness.families.valid import VLLM_BLOCK, VLLM_HOTTEST, admits, runs_in
from eagletwin.reference.sizes import reserved_slots

from .sample_cases import find_cases
from .strategies import (
    DRAWN,
    LARGE,
    NUM_STEPS,
    PAGE_SIZES,
    PAGES,
    POOL_SIZES,
    REQUEST_OPTIONS,
    SMALL_TREE,
    TOPKS,
    TREE_SIZES,
    VALUES,
    Focus,
    Kind,
    Sizes,
    cases,
    greedy_cases,
    sampling_cases,
    with_request_options,
)

# Requests whose prompts are prefilled together, where chunks would mostly keep them apart (strategies.py draws the case).
#
# Layers that keep a state leave states of several prompts in one prefill then. Simplest comes first: a case shrinks to one as
# it was drawn.

_ONE_IN = 3


@st.composite
def together(draw: st.DrawFn, cases: st.SearchStrategy[Case]) -> Case:
    """A case; one in three with all of its requests at once, and in no chunks."""
    case = draw(cases)
    if draw(st.integers(1, _ONE_IN)) < _ONE_IN:
        return case
    gathered = replace_fields(case, requests=tuple(replace_fields(request, arrive=0) for request in case.requests), chunks=())
    return gathered if admits(gathered) else case


# Two requests that fill the pool, and need what one of them leaves there (strategies.py draws the case).
#
# A prefix cache keeps what a request leaves, and a hierarchical one locks it until its copy to the host is done. Simplest comes
# first: a case shrinks to one as it was drawn.

_LATER = 3  # iterations, in which the two that fill it are alone


@st.composite
def filling(draw: st.DrawFn, cases: st.SearchStrategy[Case]) -> Case:
    """Mostly a case in which the first two requests fill the pool, where rounds ask for more than a few slots: what is free is
    enough for both to be let in, and less than a round asks for. One ends at once, and what it leaves is needed while it is
    copied to the host."""
    case = draw(cases)
    fills, left, more, seed = draw(st.tuples(st.integers(0, 3), st.integers(0, 63), st.integers(0, 7), st.integers(0, 255)))
    page, asked_for = case.page_size, 2 * reserved_slots(case.topk, case.most_steps, case.page_size, case.most_nodes)
    # for one new token of the first, two of the second, and a page of each
    least, most = 3 + 2 * page, asked_for - 2
    if not fills or len(case.requests) < 2 or least > most:
        return case
    first, second = case.requests[:2]
    free = least + left % (most - least + 1)
    # the second one is admitted where there is room for its rounds behind it, which the first one takes
    length = max(len(first.prompt), asked_for + 2 * page)
    rest = case.engine.sglang.max_total_tokens - length - free
    if rest < 1:
        return case
    pair = (
        replace_fields(first, prompt=_of_length(case, first, length, seed), max_new_tokens=1, arrive=0),
        replace_fields(
            second,
            prompt=_of_length(case, second, rest, seed),
            max_new_tokens=2 + more % (free - least + 1),
            arrive=0,
        ),
    )
    later = tuple(replace_fields(request, arrive=request.arrive + _LATER) for request in case.requests[2:])
    filled = replace_fields(case, requests=pair + later, chunks=())
    return filled if admits(filled) else case


def _of_length(case: Case, request: Request, length: int, seed: int) -> tuple[int, ...]:
    """Its prompt, cut or with more tokens."""
    more = tokens(seed, max(length - len(request.prompt), 0), RECIPES[case.model].target.vocab_size)
    return (*request.prompt, *more)[:length]


# Requests that come back: each of a drawn case may be asked again, later, with some tokens more (strategies.py draws it).
#
# What a prefix cache had to give up meanwhile comes back from the host, where the case has a hierarchical cache. Simplest comes
# first: a case shrinks to one in which nothing comes back.

_MORE = (0, 0, 1, 3, 12)  # tokens behind the prompt that is asked again


@st.composite
def returning(draw: st.DrawFn, cases: st.SearchStrategy[Case]) -> Case:
    """A case with some of its requests a second time, in their order, after the last of them has come.

    Now and then, and whenever shrinking can have it, one without the hierarchical cache.
    """
    kept = draw(st.integers(0, 63)) > 0
    case = draw(cases)
    if not kept:
        settings = replace_fields(case.engine.sglang, host_pages=0, host_policy="write_through")
        case = replace_fields(case, engine=EngineSettings(sglang=settings))
    arrive = max(request.arrive for request in case.requests)
    for request in case.requests:
        comes, after, more, seed = draw(
            st.tuples(st.integers(0, 7), st.integers(1, 24), st.sampled_from(_MORE), st.integers(0, 255))
        )
        if not comes:
            continue
        arrive += after
        own = tokens(seed, more, RECIPES[case.model].target.vocab_size)
        for tail in (own, ()):
            again = replace_fields(request, id=f"{request.id}-again", prompt=request.prompt + tail, arrive=arrive)
            if (admitted := _with(case, again)) is not None:
                case = admitted
                break
    return case


def _with(case: Case, request: Request) -> Case | None:
    more = replace_fields(case, requests=(*case.requests, request))
    return more if admits(more) else None


# Cases of a block. What later ones reach is seldom new; an engine takes about as long to build as two small cases take to run.
BLOCK = 4
AGAIN = 1_200_000  # block n + AGAIN has the configuration of block n, its size, and other cases
LONG, _EVERY = 12, 12  # small cases of every twelfth block
FEW = 3  # large cases of a block
SMALL = Sizes(prompt=10, new_tokens=10, arrival=4)
SWITCHING = replace(SMALL, new_tokens=20)  # in fewer tokens few choices of steps are made
WINDOWED = replace(SMALL, prompt=2 * ENDING)  # prompts of which rows leave a window
PAGED = replace(SMALL, prompt=2 * PAGE_SIZES[-1] + ENDING)  # prompts of up to three of the largest pages
FEW_REQUESTS = 3  # of a small case
# Prompts of up to more than a page of DeepSeek-V4's, most of which go on from about where 128 rows end: so many are a window of
# its, and so many are chosen by a DSA that a GPU's kernels take.
COMPRESSED = replace(SMALL, prompt=276, common=124)

_LARGE = 16  # one block in so many has large cases for no other reason than that
AS_RELEASED = 8  # one block in so many runs the engine as it is; in the others known live bugs are mended
# Of what no case has unless it is asked for a block is to have so much, in turn. Most have several, since there are many such
# things, and bugs that need two. Where the engine runs as it is, one: to tell several known bugs of a case apart takes many
# runs.
_EXTRAS = (3, 5, 3, 5, 1, 5, 3, 5)
_REJECTION = "rejection"
IN_STEP, SESSION, SEVERAL, ADAPTER = "abort_in_step", "session", "n", "adapter"
_OF_PLAIN = ("penalties", "logit_bias", "min_new_tokens")  # what plain decode may be asked otherwise
# fields of Focus that come with something else, or when they are asked for alone: each rank takes a core
_OF_OTHERS = ("attn_dp_size", "model", "model_runner", "host_policy", "max_loras_per_batch", "lora_backend", "grammar_backend")
# what no case has unless it is asked for, with its values
_THINGS: dict[str, tuple[Any, ...]] = {
    **{name: VALUES[name][count:] for name, count in DRAWN.items() if name not in _OF_OTHERS and VALUES[name][count:]},
    **dict.fromkeys((_REJECTION, *(name for name in REQUEST_OPTIONS if name != IN_STEP)), (True,)),
}
_GUIDED = 1 / 3  # of the blocks whose requests have grammars, so many have the other backend
_PRODUCTION = 3 / 4  # of all blocks
_LAUNCHED = sorted((one for one in DIMENSIONS.values() if one.values), key=lambda one: -one.share)
_IN_STEP = 0.5  # of the blocks of a search with overlap, so many have aborts inside a step
_BEHIND = 24  # tokens of a prompt behind the first state that the prefix cache keeps
_REMEMBERED = 1000  # blocks of a seed, from the first on, that are drawn once
_STAYS = 20  # drawings of a recipe until it is clear that it cannot have something
_TRIES = 20_000  # drawings until a block has all that was asked for; one takes some fifty microseconds
_OWN_TRIES = 400  # of these, with the recipe whose turn it is


@dataclass(frozen=True, slots=True)
class Block:
    """What the cases of one block have in common.

    seed      of the search; number: which of its blocks it is, and AGAIN for each time that its configuration was drawn before
    held      fields of `focus` that smaller cases keep as well
    sampling  how requests sample; None: all are greedy
    retract   whether requests that sample may be retracted
    asks      what requests may ask for beside (strategies.py)
    production  settings of how users run it: graphs, overlap, branches of CUDA. What else a block has does not depend on it
    engine    which runs it
    stages    of a pipeline, whose scheduler is never paused: the engine's goes on (docs/findings/pipeline-pause)
    """

    seed: int
    number: int
    focus: Focus
    held: tuple[str, ...]
    sampling: Kind | None
    large: bool
    retract: bool
    asks: tuple[str, ...] = ()
    stages: int = 1
    production: Mapping[str, Any] = field(default_factory=dict)
    engine: Engine = DEFAULT_ENGINE

    @property
    def probe(self) -> Case:
        """The smallest case of the block's configuration, which has all that its requests may ask for."""
        return self.launched(self.bare_probe, self.production)

    def launched(self, case: Case, production: Mapping[str, Any]) -> Case:
        """The case on the block's engine, launched as its users do."""
        return (
            on_vllm(case, whole_budget=self.number % 2 > 0, ahead=self.number // 2 % 2 == 0)
            if self.engine == "vllm"
            else with_settings(case, **production)
        )

    @property
    def bare_probe(self) -> Case:
        """The probe, not launched in any way."""
        asks = [REQUEST_OPTIONS[name] for name in self.asks if REQUEST_OPTIONS[name].example is not None]
        request, aborted = Request(id="a", prompt=(0,), max_new_tokens=1), "a"
        requests: tuple[Request, ...] = (_example(request, asks),)
        if SEVERAL in self.asks:  # no turn of a session has several samples
            several = replace_fields(requests[0], id="b", session="")
            requests = (replace_fields(requests[0], n=1), several) if SESSION in self.asks else (several,)
            aborted = "b.1"
        events = (Event(at=0, kind="abort", request=aborted, step=1),) if IN_STEP in self.asks else ()
        case = self.focus.case("probe", requests, events=events)
        if self.sampling is None:
            return case
        own = Sampling(seed=0 if self.focus.deterministic else None)
        settings = replace_fields(case.engine.sglang, rejection_sampling=self.sampling == "rejection")
        of_sampling = [ask for ask in asks if hasattr(own, ask.name)]
        sampled = tuple(_example(replace_fields(one, sampling=own), of_sampling) for one in requests)
        return replace_fields(case, requests=sampled, engine=EngineSettings(sglang=settings))

    @property
    def strategy(self) -> SearchStrategy[Case]:
        """All cases of the block, and simpler ones, to which a case that shows something is shrunk."""
        options: dict[str, Any] = {"held": self.held, "sizes": self.sizes}
        if not self.large:
            options |= {"max_requests": FEW_REQUESTS}
        if self.sampling is None:
            drawn = greedy_cases(self.focus, **options)
        else:
            drawn = sampling_cases(self.focus, rejection=self.sampling == "rejection", retract=self.retract, **options)
        if self.focus.host_slots:
            drawn = returning(filling(drawn))
        if self.sizes.common:
            drawn = together(drawn)
        if self.stages > 1:
            drawn = drawn.map(without_pauses)
        drawn = with_request_options(drawn, self.asks) if self.asks else drawn
        bare = not self.production and self.engine == DEFAULT_ENGINE
        return drawn if bare else drawn.map(lambda case: self.launched(case, self.production))

    @property
    def sizes(self) -> Sizes:
        """How large its requests are. Where the prefix cache keeps states, prompts come to one and part there."""
        target = RECIPES[self.focus.model].target
        if target.compressed is not None or (target.index is not None and target.index.chosen > SMALL.prompt):
            sizes = COMPRESSED
        elif self.large:
            sizes = LARGE
        elif self.focus.adaptive:
            sizes = SWITCHING
        elif self.focus.page_size == PAGE_SIZES[-1]:
            sizes = PAGED
        else:
            sizes = WINDOWED if 0 < RECIPES[self.focus.model].window <= ENDING else SMALL
        grid = RECIPES[self.focus.model].tracked_every if self.focus.radix_cache else 0
        if not grid:
            return sizes
        return replace(sizes, prompt=max(sizes.prompt, grid + _BEHIND), arrival=LARGE.arrival, common=grid)

    def cases(self, count: int | None = None) -> list[Case]:
        """Up to `count` different cases of the block's own configuration, the same whenever they are drawn; None: `size`."""
        own = self.probe.configuration()
        return find_cases(self.strategy, count or self.size, self.draw_seed, lambda case: case.configuration() == own)

    @property
    def size(self) -> int:
        """How many cases it has. What a case leaves behind for those after it shows in a long one."""
        if self.large:
            return FEW
        return LONG if self.number % _EVERY == _EVERY - 1 else BLOCK

    @property
    def as_released(self) -> bool:
        """Whether it runs the engine as it is. The first does not, since nobody sees its cases until a known bug is told. Nor
        do large cases, but for those of a hierarchical cache, which are all large: they show several bugs at once, and to tell
        which takes a dozen runs."""
        in_turn = self.number % AS_RELEASED == AS_RELEASED // 2
        return in_turn and (not self.large or self.focus.host_slots > 0)

    @property
    def as_always(self) -> "Block":
        """The block as a CPU runs it by itself."""
        return replace(self, production={})

    @property
    def draw_seed(self) -> int:
        return self.seed * 1_000_003 + self.number


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchConstraints:
    """What all blocks of a search have.

    held      fields of `Focus` -> their value
    sampling  "" greedy alone; None: drawn, with all the rest
    asks      what requests may ask for beside; none: one thing in some blocks
    wanted    whether a block with this probe is to be searched
    widest    the largest topk
    retract   as in Block
    overlap   whether a batch is launched before the result of the one before is looked at: then every second block has
              aborts between the two, unless requests are to ask for something
    stages, engine  as in Block
    production  whether most blocks have graphs, overlap and the branches of CUDA
    beside    recipes that are drawn though no search has them unless it is asked for
    drawn     the first blocks with each seed, as far as they were drawn
    """

    held: Mapping[str, Any] = field(default_factory=dict)
    sampling: Kind | str | None = None
    asks: tuple[str, ...] = ()
    wanted: Callable[[Case], bool] = lambda probe: True
    widest: int = TOPKS[-1]
    retract: bool = True
    overlap: bool = False
    stages: int = 1
    production: bool = False
    beside: tuple[str, ...] = ()
    engine: Engine = DEFAULT_ENGINE
    drawn: dict[tuple[int, int], Block] = field(default_factory=dict, init=False, repr=False, compare=False)


def on_vllm(case: Case, *, whole_budget: bool, ahead: bool) -> Case:
    """A drawn case as one for vLLM: with a pool of as many rows, and without what it is not driven with."""
    settings = case.engine.sglang
    own = replace_fields(
        case.vllm,
        num_gpu_blocks=max(settings.max_total_tokens // case.page_size, 4),
        max_num_seqs=settings.max_running_requests,
        whole_budget=whole_budget,
        async_scheduling=ahead and case.vllm.model_runner == "v2",
        enable_prefix_caching=settings.radix_cache,
        draft_sample_method="probabilistic" if settings.rejection_sampling else "greedy",
    )
    case = with_requests(case, lambda request: put(request, "temperature", min(get(request, "temperature"), VLLM_HOTTEST)))
    if settings.rejection_sampling:
        case = with_requests(case, lambda request: put(request, "top_k", 0) if get(request, "top_k") == 1 else request)
    kept = tuple(event for event in case.events if event.kind == "abort" and not event.step)
    chunks = tuple(size * 4 // case.page_size for size in case.chunks)  # which end inside of blocks, too
    return replace_fields(case, events=kept, chunks=chunks, engine=EngineSettings(vllm=own))


# Fields of Focus that a search on vLLM holds: chains in its smallest blocks. One block of four is of runner V1, unless it is to
# have what V1 is not driven with; in half of both requests ask for one of these.
_ON_VLLM: dict[str, Any] = {"topk": TOPKS[0], "page_size": VLLM_BLOCK}
_RUNNER_V1 = 0.25
_ASKED_OF: dict[ModelRunner, tuple[str, ...]] = {"v1": ("penalties",), "v2": ("penalties", "logit_bias")}


def cases_on(
    focus: Focus | None = None, *, held: Collection[str] = (), engine: Engine = DEFAULT_ENGINE, **options: Any
) -> SearchStrategy[Case]:
    """Cases as `strategies.cases` draws them, of those that an engine runs."""
    if engine == DEFAULT_ENGINE:
        return cases(focus, held=held, **options)

    def of(model: str) -> SearchStrategy[Case]:
        own = replace(focus or Focus(), model=model, **_ON_VLLM)
        drawn = cases(own, held={*held, *_ON_VLLM, "model"}, **options)
        return drawn.map(partial(on_vllm, whole_budget=False, ahead=False))

    turns = _turns(SearchConstraints(engine=engine))
    models = st.sampled_from([*dict.fromkeys(turns)]) if focus is None else st.just(focus.model)
    return models.flatmap(of).filter(lambda case: runs_in(case, Mode(engine=engine)))


def _example(request: Request, asks: Collection[Dimension]) -> Request:
    for ask in asks:
        request = ask.put(request, ask.example)
    return request


def without_pauses(case: Case) -> Case:
    """Without the events that pause a scheduler, or have it retract all that runs."""
    return replace_fields(case, events=tuple(event for event in case.events if event.kind in ("abort", "flush")))


def block_of(seed: int, number: int, asked: SearchConstraints) -> Block:
    """Block `number` of the search with this seed. Raises InputError if there is no such block."""
    if number >= AGAIN:
        return replace(block_of(seed, number % AGAIN, asked), number=number)
    if (seed, number) in asked.drawn:
        return asked.drawn[seed, number]
    block = _draw(seed, number, asked)
    if number < _REMEMBERED:
        asked.drawn[seed, number] = block
    return block


def _draw(seed: int, number: int, asked: SearchConstraints) -> Block:
    turns, random, guided = _turns(asked), Random(seed * 7919 + number), Random(f"{seed} {number} grammar")
    cycle, turn = divmod(number, len(turns))
    model, tree = _spread(turns, Random(f"{seed} {cycle}"))[turn]
    extras, in_turn = dict[str, Any](), _in_turn(seed, number) if asked.engine == DEFAULT_ENGINE else {}

    ways = _ways(seed, number, asked)

    def draw(wanted: Mapping[str, Any], model: str, tree: bool | None = None) -> Block | None:
        block = _draw_block(random, guided, seed, number, model, asked, wanted, tree)
        if block is None:
            return None
        probes = dict[tuple[str, ...], Case]()
        for production, more in ways:
            asks = (*block.asks, *more)
            if asks not in probes:
                probes[asks] = replace(block, asks=asks).bare_probe
            probe = block.launched(probes[asks], production)
            if asked.wanted(probe):  # the cheaper question
                plain = block.probe
                if not admits(plain):
                    return None
                if probe == plain or admits(probe):
                    retract = asked.retract and not production.get("overlap")
                    return replace(block, production=production, retract=retract, asks=asks)
        return None

    for attempt in range(_TRIES):
        if attempt >= _STAYS:  # what was asked for needs something, or another recipe
            things = in_turn if attempt < _OWN_TRIES else {name: random.choice(of) for name, of in _THINGS.items()}
            extras = dict(random.sample([*things.items()], random.randint(0, max(_EXTRAS)))) if in_turn else {}
            model = model if attempt < _OWN_TRIES else random.choice(turns)
        if found := draw(extras, model, tree if attempt < _STAYS else None):
            break
    else:
        raise InputError(
            "no generated case has all that was asked for",
            consequence="nothing was run",
            remedy="leave out one of the options that choose cases, or of those that say how they run",
        )
    first = next(iter(in_turn), "")
    for name, value in in_turn.items():
        if len(extras) >= _EXTRAS[number % len(_EXTRAS)]:
            break
        if name in extras:
            continue
        more = {**extras, name: value}
        # what is first in turn may take a recipe's turn, since some things few recipes have
        others = random.choices([name for name in RECIPES if name in turns], k=_STAYS) if name == first else []
        recipes = [(found.focus.model, tree)] * _STAYS + [(recipe, None) for recipe in (found.focus.model, *others)]
        tries = (draw(more, recipe, its) for recipe, its in recipes)
        if another := next((one for one in tries if one is not None), None):
            found, extras = another, more
    return found


def _ways(seed: int, number: int, asked: SearchConstraints) -> list[tuple[dict[str, Any], tuple[str, ...]]]:
    """How a block may be launched, what is drawn for it first, and what requests then ask for in addition: nothing, or aborts
    inside a step, which come first in a part of the blocks with overlap. Without overlap they are one kind of aborts between
    steps, and no block has them where it is not to."""
    in_step = Random(f"{seed} {number} {IN_STEP}").random() < _IN_STEP
    found = list[tuple[dict[str, Any], tuple[str, ...]]]()
    for production in _launches(seed, number, asked):
        first = in_step and (asked.overlap or production.get("overlap", False))
        found += [(production, more) for more in ([()] if asked.asks else [(IN_STEP,), ()] if first else [(), (IN_STEP,)])]
    return [one for place, one in enumerate(found) if one not in found[:place]]


def _launches(seed: int, number: int, asked: SearchConstraints) -> list[dict[str, Any]]:
    """How a block may be launched, what is drawn for it first: three in four as users do. Then what most of them have of that,
    all together, each alone, and none, for a search that wants one, or what one of them excludes."""
    if not asked.production:
        return [{}]
    random = Random(f"{seed} {number} production")
    as_users_do = random.random() < _PRODUCTION
    drawn = {one.name: random.choice(one.values) for one in _LAUNCHED if as_users_do and random.random() < one.share}
    whole = {one.name: one.values[0] for one in _LAUNCHED if one.share > 1 / 2}
    rest = [{one.name: value} for one in _LAUNCHED if one.name not in whole for value in one.values]
    most = {name: value for name, value in drawn.items() if name in whole}
    alone = ({name: value} for name, value in whole.items())
    return [drawn, most, whole, *(whole | one for one in rest), *alone, *rest, {}]


def _turns(asked: SearchConstraints) -> list[str]:
    """The recipes of one cycle of blocks. Each has its turn; one with fewer layers, which runs faster, has several."""
    drawn = [recipe for recipe in RECIPES.values() if recipe.name in asked.beside or not family_of(recipe).asked_for]
    driven = [recipe for recipe in drawn if runs_on(recipe, asked.engine)]
    return [recipe.name for recipe in driven for _ in range(max(1, 4 // recipe.target.num_layers))]


def _spread(turns: list[str], random: Random) -> list[tuple[str, bool]]:
    """A cycle's turns in their order, and whether each is a tree's. Recipes of one kind come at even distances, in chains and
    trees by turns: a shuffle may have those of one kind late, or all together."""
    kinds = dict[tuple[bool, ...], list[str]]()
    for name in random.sample(turns, len(turns)):
        recipe = RECIPES[name]
        target = recipe.target
        kind = (
            recipe.mtp_layers > 0,
            recipe.chained,
            recipe.reads_states,
            recipe.frozen,
            bool(target.aux_layers),
            target.latent is not None,
            target.states > 0,
        )
        kinds.setdefault(kind, []).append(name)
    placed = list[tuple[float, str, bool]]()
    for names in kinds.values():
        first, tree = random.random(), random.randrange(2)
        placed += [((first + place) / len(names), name, place % 2 == tree) for place, name in enumerate(names)]
    return [(name, tree) for _, name, tree in sorted(placed)]


def _in_turn(seed: int, number: int) -> dict[str, Any]:
    """What no case has unless it is asked for, with one of its values each: in the order in which a block is to have it, which
    goes on where the block before ended."""
    things = dict(_THINGS)
    before = number // len(_EXTRAS) * sum(_EXTRAS) + sum(_EXTRAS[: number % len(_EXTRAS)])
    cycle, place = divmod(before, len(things))
    if cycle % 2:  # cases of a hierarchical cache are all large: a block takes as long as three others
        things.pop("host_slots", None)
        place = min(place, len(things) - 1)
    order = Random(f"{seed} extras {cycle}").sample([*things], len(things))
    return {name: things[name][(cycle + seed) % len(things[name])] for name in (*order[place:], *order[:place])}


def _draw_block(
    random: Random,
    guided: Random,
    seed: int,
    number: int,
    model: str,
    asked: SearchConstraints,
    extras: Mapping[str, Any],
    tree: bool | None,
) -> Block | None:
    """guided: by which the backend of grammars is drawn, and vLLM's own, apart from all else, which is as without it. tree:
    whether it is to have trees, where nothing else says so; None: that is drawn."""
    of_engine = _draw_on_vllm(guided, asked) if asked.engine == "vllm" else {}
    held = {**{name: value for name, value in extras.items() if name in VALUES}, **of_engine, **asked.held}
    asks = asked.asks or tuple(name for name in extras if name in REQUEST_OPTIONS)
    if asked.engine == "vllm" and not asks and guided.random() < 0.5:
        asks = (guided.choice(_ASKED_OF[held["model_runner"]]),)
    held, asks = _add_prerequisites(random, guided, held, asks)
    recipe = RECIPES[held.get("model", model)]
    branches = random.random() < 0.5 if tree is None else tree
    branches = branches and not recipe.page  # the engine runs chains alone of a model that has a page size of its own
    topk = held.get("topk", min(asked.widest, random.choice(TOPKS[1:])) if branches else TOPKS[0])
    drawn = Focus(
        model=recipe.name,
        num_steps=random.choice(NUM_STEPS),
        topk=topk,
        tree_size=random.choice(TREE_SIZES),
        page_size=random.choice((*PAGE_SIZES[:2], *PAGE_SIZES[:2], *PAGE_SIZES[:2], *PAGE_SIZES)),
        radix_cache=random.random() < 0.6,
        max_total_tokens=random.choice((512, 512, 96, 128)),
        max_running_requests=random.choice((8, 8, 8, 2)),
    )
    focus = replace(drawn, **held)
    if recipe.mtp_layers:
        steps = focus.num_steps if "num_steps" in held else 1 + (focus.num_steps - 1) % recipe.mtp_layers
        focus = replace(focus, num_steps=steps, tree_size=TREE_SIZES[0])
    elif focus.tree_size == SMALL_TREE and "num_steps" not in held:
        focus = replace(focus, num_steps=max(focus.num_steps, 2))  # of one step the smallest tree has all of its path
    if recipe.page:  # a request has whole pages, and a small pool holds none
        slots = max(POOL_SIZES[0], PAGES * recipe.page)
        focus = replace(focus, page_size=recipe.page, max_total_tokens=slots, tree_size=TREE_SIZES[0])
    if recipe.target.states:  # smaller cases would lose the cache of states, and no case were of this configuration
        held |= {"radix_cache": focus.radix_cache}
    if focus.draft_sink and not focus.draft_window:  # a sink is beside a window
        focus = replace(focus, draft_window=random.choice(VALUES["draft_window"][1:]))
    sampling = _sampling(random, asked, focus.model_runner, may_reject=topk == 1 and recipe.samples_drafts)
    if focus.host_slots and asked.sampling is None and not asked.retract:  # its small pool retracts
        sampling = None
    retracting = SEVERAL in asks and sampling is not None and not asked.retract  # samples of a small pool retract each other
    # a batch of one request finds nobody to retract where the other batches of its pipeline fill the pool, and gives it up
    if (retracting or asked.stages > 1) and "max_total_tokens" not in held:
        focus = replace(focus, max_total_tokens=POOL_SIZES[0])
    if any(getattr(focus, name) != value for name, value in held.items()) or not _takes_effect(focus, sampling, extras, asks):
        return None
    large = random.randrange(_LARGE) == 0 or bool(focus.host_slots)
    # what no default of Focus is, and smaller cases are not to lose: strategies.configurations would
    layered_tree = ("topk",) if recipe.mtp_layers and focus.topk > 1 else ()
    kept = tuple(sorted({*held, *layered_tree} - ({*extras, *_OF_OTHERS} - asked.held.keys())))
    return Block(seed, number, focus, kept, sampling, large, asked.retract, asks, asked.stages, engine=asked.engine)


def _draw_on_vllm(guided: Random, asked: SearchConstraints) -> dict[str, Any]:
    """Fields of Focus of a block on vLLM."""
    v1 = guided.random() < _RUNNER_V1 and {*asked.asks} <= {*_ASKED_OF["v1"]} and not asked.sampling
    return _ON_VLLM | {"model_runner": VALUES["model_runner"][v1]}


def _add_prerequisites(
    random: Random, guided: Random, held: dict[str, Any], asks: tuple[str, ...]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The same with what some of them do nothing without, or come with."""
    if held.get("host_slots"):  # a pool that runs out, with a cache that has something to give up
        drawn_with = {
            "max_total_tokens": random.choice((64, 96, 128)),
            "host_policy": random.choice((*VALUES["host_policy"], *VALUES["host_policy"][::2])),
        }
        held = {"radix_cache": True, **drawn_with, **held}
    if held.get("plain_decode") and not asks:  # without one of these it has nothing that verify does in another way
        asks = (random.choice(_OF_PLAIN),)
    if SESSION in asks:  # the cache keeps what is a session's
        held = {"radix_cache": True, **held}
    if ADAPTER in asks:
        held = {
            "max_loras_per_batch": random.choice(VALUES["max_loras_per_batch"]),
            "lora_backend": random.choice(VALUES["lora_backend"]),
            **held,
        }
    if "grammar" in asks and guided.random() < _GUIDED:
        held = {"grammar_backend": VALUES["grammar_backend"][1], **held}
    return held, asks


def _takes_effect(focus: Focus, sampling: Kind | None, extras: Mapping[str, Any], asks: Collection[str]) -> bool:
    """Whether the configuration is one that the engine has, with all that is asked of it."""
    recipe = RECIPES[focus.model]
    if sampling == "rejection" and (focus.topk > 1 or not recipe.samples_drafts):
        return False
    if (focus.threshold < 1 or focus.deterministic) and sampling != "target":
        return False
    if "min_p" in asks and sampling is None:
        return False
    if focus.mixed_chunks and not recipe.is_eagle:
        return False  # the engine switches it off
    if recipe.window and focus.pool <= recipe.window + focus.page_size:
        return False  # its pool of windows holds no request
    if focus.host_slots and (not focus.radix_cache or not keeps_on_host(recipe)):
        return False
    if SESSION in asks and (not focus.radix_cache or not keeps_sessions(recipe) or focus.host_slots):
        return False
    if ADAPTER in asks and (focus.adaptive or not takes_adapters(recipe)):
        return False  # the engine refuses them, or eagletwin has none
    if focus.adaptive and (focus.topk > 1 or not recipe.single_head):
        return False  # the engine switches it off
    if focus.plain_decode and (sampling is not None or SESSION in asks):
        return False  # it is asked of greedy requests, which are of no session
    return (focus.tree_size != SMALL_TREE or focus.topk > 1) and (_REJECTION not in extras or sampling == "rejection")


def _sampling(random: Random, asked: SearchConstraints, runner: ModelRunner, *, may_reject: bool) -> Kind | None:
    """How requests of a block sample: in every second block not at all."""
    first, second = random.random() < 0.5, random.random() < 0.5
    if asked.sampling == "" or (asked.engine == "vllm" and runner == "v1"):
        return None
    if asked.sampling in ("target", "rejection"):
        return "rejection" if asked.sampling == "rejection" else "target"
    if asked.sampling is None and first:
        return None
    return "rejection" if second and may_reject else "target"
