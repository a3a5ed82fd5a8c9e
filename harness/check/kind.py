"""What makes a case a special one: the dimensions by which a case is compared with those of the ledger (known.py).

A new field of a case gets a dimension here, or a reason in tests/harness/test_kind.py why no bug needs it.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache

from eagletwin.harness.core.case import Case, Request, SGLangSettings
from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.recipe import Recipe

Kind = Mapping[str, bool]


@lru_cache(1024)  # each case of a search is compared with each of the ledger
def kind_of(case: Case) -> Kind:
    """Of each dimension whether the case has it."""
    return {name: has(case) for name, has in DIMENSIONS.items()}


def covers(needed: Kind, kind: Kind) -> bool:
    """Whether a case of this kind has all that is needed."""
    return all(kind[name] for name, needs in needed.items() if needs)


def likeness(one: Kind, other: Kind) -> int:
    """In how many dimensions two cases agree."""
    return sum(one[name] == other[name] for name in DIMENSIONS)


def _recipe(has: Callable[[Recipe], bool]) -> Callable[[Case], bool]:
    return lambda case: has(RECIPES[case.model])


def _settings(has: Callable[[SGLangSettings], bool]) -> Callable[[Case], bool]:
    return lambda case: has(case.engine.sglang)


def _request(has: Callable[[Request], bool]) -> Callable[[Case], bool]:
    return lambda case: any(map(has, case.requests))


def _mixed_with_pages(case: Case, radix_cache: bool) -> bool:
    settings = case.engine.sglang
    return settings.mixed_chunks and settings.radix_cache == radix_cache and case.page_size > 1


DIMENSIONS: dict[str, Callable[[Case], bool]] = {
    "multi_layer": _recipe(lambda recipe: recipe.mtp_layers > 0),
    "reads_no_states": _recipe(lambda recipe: not recipe.reads_states),
    "frozen": _recipe(lambda recipe: recipe.frozen),
    "windows": _recipe(lambda recipe: any(recipe.target.windows)),
    "states": _recipe(lambda recipe: recipe.target.states > 0),
    "scan": _recipe(lambda recipe: recipe.target.scan is not None),
    "tree": lambda case: case.topk > 1,
    "small_tree": lambda case: case.verify_nodes <= case.num_steps,
    "samples": _request(lambda request: request.sampling is not None),
    "min_p": _request(lambda request: request.sampling is not None and request.sampling.min_p > 0),
    "rejection_sampling": _settings(lambda settings: settings.rejection_sampling),
    "context_length": _settings(lambda settings: settings.context_length > 0),
    "draft_window": _settings(lambda settings: settings.draft_window > 0),
    "processor": lambda case: case.processes,
    "penalized": _request(lambda request: request.penalized),
    "grammar": lambda case: case.constrains,
    "grammar_of_llguidance": lambda case: case.constrains and case.engine.sglang.grammar_backend == "llguidance",
    "mixed_chunks": _settings(lambda settings: settings.mixed_chunks),
    "mixed_grammar": lambda case: case.constrains and case.engine.sglang.mixed_chunks,
    "mixed_pages": lambda case: _mixed_with_pages(case, radix_cache=False),
    "mixed_pages_cached": lambda case: _mixed_with_pages(case, radix_cache=True),
    "logprobs_of_prompt": _request(lambda request: request.logprobs is not None and request.logprobs.start >= 0),
    "hidden_states": lambda case: case.gives_states != "",
    "hidden_states_of_layers": lambda case: case.gives_states != "" and bool(RECIPES[case.model].target.aux_layers),
    "adaptive": _settings(lambda settings: settings.adaptive is not None),
    "adaptive_rejection": _settings(lambda settings: settings.adaptive is not None and settings.rejection_sampling),
    "host_pages": _settings(lambda settings: settings.host_pages > 0),
    "session": lambda case: bool(case.sessions),
    "session_with_adapter": lambda case: bool(case.sessions) and bool(case.adapters),
    "stream": _request(lambda request: request.stream),
    "plain_decode": _settings(lambda settings: settings.plain_decode),
}
