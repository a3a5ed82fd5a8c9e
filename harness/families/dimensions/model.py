"""The model: what its recipe has that a simpler one has not."""

from collections.abc import Callable, Iterator
from typing import Any

from msgspec.structs import replace

from eagletwin.harness.core.case import Case, Request
from eagletwin.harness.families import RECIPES, family_of
from eagletwin.harness.families.mimo_v2 import ENDING
from eagletwin.harness.families.recipe import Recipe

from .dimension import Dimension, Refusal, on_one_rank, with_requests


def _with(model: str) -> Callable[[Case], Iterator[Case]]:
    """Another recipe; tokens that it does not have become others, and it has DP attention where it can."""

    def restrict_tokens(request: Request) -> Request:
        size = RECIPES[model].target.vocab_size
        prompt = tuple(token % size for token in request.prompt)
        return replace(request, prompt=prompt, stop=tuple(token for token in request.stop if token < size))

    def of_recipe(case: Case) -> Iterator[Case]:
        found = replace(with_requests(case, restrict_tokens), model=model)
        yield found if family_of(RECIPES[model]).dp_attention else on_one_rank(found)

    return of_recipe


def _of_llama(recipe: Recipe) -> str:
    """The Llama whose draft is of the same kind and has as many layers, chained or not, as far as there is one."""
    if recipe.algorithm == "EAGLE3":
        return "llama-eagle3" if recipe.draft_vocab_size else "llama-eagle3-full"
    if not recipe.mtp_layers:
        return "llama-tiny"
    return "llama-mtp-chain" if recipe.chained else "llama-mtp"


def _layer_refusals(case: Case) -> Iterator[Refusal]:
    layers, steps = RECIPES[case.model].mtp_layers, case.num_steps
    if layers and steps > layers:
        yield f"num_steps {steps}: {case.model} has {layers} layers", f"use 1 to {layers}"
    if layers and case.verify_nodes != steps + 1:
        of = f"a multi-layer draft of {steps} step{'s' * (steps > 1)} has {steps + 1}"
        yield f"num_draft_tokens {case.verify_nodes}: {of}", "leave num_draft_tokens out"


def _compressed_refusals(case: Case) -> Iterator[Refusal]:
    """What of a case nobody judges yet of a model with compressed rows, beside what chosen rows do not have either."""
    shape = RECIPES[case.model].target.compressed
    if shape is None:
        return
    yield from _untried(case)
    most, settings = 4 * shape.chosen, case.engine.sglang
    for request in case.requests:
        if len(request.prompt) + request.max_new_tokens >= most:
            yield (
                f"{request.id!r} has {most} rows or more with {case.model}: which are left out is not judged",
                "make it shorter",
            )
        if request.hidden_states:
            yield f"hidden_states of {request.id!r} with {case.model}: not tried", "leave them out"
    if settings.update_weights:
        yield f"update_weights with {case.model}: not tried", "leave it out"


def _untried(case: Case) -> Iterator[Refusal]:
    """What of a case nobody judges yet of a model whose rows attend to chosen rows, or are compressed."""
    settings = case.engine.sglang
    if case.topk > 1:
        yield f"topk {case.topk} with {case.model}: SGLang's backend lets a node of verify see all before it", "use 1"
    asked = {
        "host_pages": settings.host_pages,
        "plain_decode": settings.plain_decode,
        "draft_window": settings.draft_window,
        "cuda_branches": settings.cuda_branches,
        "adaptive": settings.adaptive is not None,
    }
    if settings.deterministic:
        yield f"deterministic with {case.model}: SGLang has no such kernels of its backend", "leave it out"
    for name in (name for name, value in asked.items() if value):
        yield f"{name} with {case.model}: not tried", "leave it out"


def _of_recipes(words: str, has: Callable[[Recipe], Any], model: str = "", key: str = "", **more: Any) -> Dimension:
    """model: the recipe that takes its place; empty: bisect has another name for it."""
    usually: dict[str, Any] = {
        "says": lambda case: case.model,
        "plain": model,
        "without": _with(model) if model else None,
        "kinds": {more["kind"]: lambda case: bool(has(RECIPES[case.model]))} if "kind" in more else {},
    }
    usually |= {name: value for name, value in more.items() if name != "kind"}
    return Dimension(name=words, words=words, key=key, has=lambda case: bool(has(RECIPES[case.model])), **usually)


# In the order in which bisect takes them away: each leaves a recipe that the next may simplify
DIMENSIONS = (
    _of_recipes(
        "model family",
        lambda recipe: family_of(recipe).modules,
        "Llama's (llama-tiny, llama-mtp, llama-mtp-chain)",
        without=lambda case: _with(_of_llama(RECIPES[case.model]))(case),
    ),
    _of_recipes("chained layers", lambda recipe: recipe.chained, "llama-mtp"),
    _of_recipes(
        "multi-layer draft",
        lambda recipe: recipe.mtp_layers > 0,
        "llama-tiny",
        "layers",
        kind="multi_layer",
        refusals=_layer_refusals,
    ),
    _of_recipes("draft vocabulary", lambda recipe: recipe.draft_vocab_size is not None, "llama-eagle3-full"),
    _of_recipes("EAGLE-3", lambda recipe: recipe.algorithm == "EAGLE3", "llama-tiny", "eagle3"),
    _of_recipes("plain draft model", lambda recipe: recipe.algorithm == "STANDALONE", "llama-tiny"),
    _of_recipes("larger model", lambda recipe: recipe.family == "llama" and recipe.name != "llama-tiny", "llama-tiny"),
    _of_recipes("EAGLE-1/2", lambda recipe: recipe.algorithm == "EAGLE" and not recipe.mtp_layers, key="eagle"),
    _of_recipes("plain draft models", lambda recipe: not recipe.reads_states, key="plain-draft", kind="reads_no_states"),
    _of_recipes("latent attention", lambda recipe: recipe.target.latent is not None, key="latent"),
    _of_recipes(
        "sparse attention",
        lambda recipe: recipe.target.index is not None,
        key="sparse",
        kind="sparse",
        refusals=lambda case: iter(()) if RECIPES[case.model].target.index is None else _untried(case),
        modes=dict.fromkeys(("tp", "pp", "dp"), "not tried"),
    ),
    _of_recipes(
        "compressed rows",
        lambda recipe: recipe.target.compressed is not None,
        key="compressed",
        kind="compressed",
        refusals=_compressed_refusals,
        modes=dict.fromkeys(("tp", "pp", "dp"), "not tried"),
    ),
    _of_recipes("experts", lambda recipe: recipe.target.routed, key="experts"),
    _of_recipes("windows that end", lambda recipe: 0 < recipe.window <= ENDING, key="windows"),
    _of_recipes("layers that keep a state", lambda recipe: recipe.target.states > 0, key="states", kind="states"),
    _of_recipes("frozen KV", lambda recipe: recipe.frozen, kind="frozen"),
    _of_recipes("windows", lambda recipe: any(recipe.target.windows), kind="windows"),
    _of_recipes("scans", lambda recipe: recipe.target.scan is not None, kind="scan"),
)
