"""Features by which a search is narrowed, and what it left out of them: each with the option that adds it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import combinations
from typing import Any

from msgspec.structs import replace

from eagletwin.cases.strategies import CONTEXT_LENGTHS, SMALL_TREE, TOPKS, WEIGHT_UPDATES
from eagletwin.harness.core.case import Case, Request
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.mode import CPU, Mode
from eagletwin.harness.core.terminal import nearest
from eagletwin.harness.families import FAMILIES, RECIPES
from eagletwin.harness.families.dimensions import DIMENSIONS
from eagletwin.harness.families.dimensions.dimension import Dimension
from eagletwin.harness.families.modes import runs_in

# Features that users run: the dimensions that have a name there.
TOPICS = tuple(dimension for dimension in DIMENSIONS.values() if dimension.key)
_BY_KEY = {topic.key: topic for topic in TOPICS}
# Names of one value of a setting: a field of cases.strategies.Focus, and the value.
VALUES: Mapping[str, tuple[str, Any]] = {
    **{f"topk={topk}": ("topk", topk) for topk in TOPKS},
    **{f"context-length={length}": ("context_length", length) for length in sorted(filter(None, CONTEXT_LENGTHS))},
    **{f"updates={how}": ("update_weights", how) for how in WEIGHT_UPDATES if how},
}
# Topics and values that a block is drawn with, in place of being drawn until it has them.
_HELD: Mapping[str, tuple[str, Any]] = {"chains": ("topk", TOPKS[0]), "small-trees": ("tree_size", SMALL_TREE), **VALUES}
# Options, and fields of Mode, without which a case may run that does not with them.
_OPTIONS = ("pp", "tp", "dtype", "attention", "graphs", "device")


def topics_of(case: Case) -> tuple[str, ...]:
    """The names of the topics that a case has."""
    return tuple(topic.words for topic in TOPICS if topic.has(case))


def has(case: Case, name: str) -> bool:
    """Whether a case has a feature: a topic by its key, a value of a setting, a recipe or a family by its name."""
    if (topic := _BY_KEY.get(name)) is not None:
        return topic.has(case)
    if name in VALUES:
        field, value = VALUES[name]
        return bool(getattr(case if field == "topk" else case.engine.sglang, field) == value)
    return name in (case.model, RECIPES[case.model].family)


def narrowed(only: Sequence[str], left_out: Sequence[str]) -> Callable[[Case], bool]:
    """Whether a case has one of the features of each of `only`, a list with commas, and none of `left_out`. Raises InputError
    for a name that is no feature's."""
    wanted = [each.split(",") for each in only]
    unwanted = [name for each in left_out for name in each.split(",")]
    names = dict.fromkeys([*_BY_KEY, *VALUES, *FAMILIES, *RECIPES])
    for name in (*(name for each in wanted for name in each), *unwanted):
        if name not in names:
            raise InputError(f"there is no feature {name!r}", consequence="nothing was run", remedy=nearest(name, names))
    return lambda case: (
        all(any(has(case, name) for name in each) for each in wanted) and not any(has(case, name) for name in unwanted)
    )


def held_by(only: Sequence[str]) -> dict[str, Any]:
    """Fields of cases.strategies.Focus that are the same in all cases with these features."""
    return dict([_HELD[name] for name in only if name in _HELD] + [("model", name) for name in only if name in RECIPES])


def sampling_of(only: Sequence[str], left_out: Sequence[str]) -> str | None:
    """How the requests of all cases with these features sample, as cases.blocks.Asked has it; None: in any way, or not."""
    if "sampling" in left_out:
        return ""
    if "rejection" in only:
        return "rejection"
    return None if "sampling" not in only else "target" if "rejection" in left_out else "any"


def not_looked_at(topics: Collection[str], models: Collection[str], mode: Mode) -> list[str]:
    """What neither the cases nor the mode had, each with the option for it."""
    alone = " without --pp" if mode.pp > 1 else ""  # of what a pipeline does not run
    missing = [f"{topic.words} (--only {topic.key}{_of_topic(topic, mode)})" for topic in TOPICS if topic.words not in topics]
    left = dict[str, list[str]]()
    for name in RECIPES:
        if name not in models:
            left.setdefault(_of_recipe(name, mode), []).append(name)
    missing += [f"recipes: {', '.join(names)} (--only {names[0]}{where})" for where, names in sorted(left.items())]
    missing += ["bfloat16, which users run (--dtype bfloat16)"] if mode.dtype == "float32" else []
    missing += [f"tensor parallelism (--tp 2{alone})"] if mode.tp == 1 else []
    missing += [] if mode.overlap else [f"the overlap scheduler (--overlap{alone})"]
    if mode.device == "cpu":
        missing += [] if alone or mode.tp > 1 or mode.overlap else ["pipelines (--pp 2)"]
        return [*missing, f"CUDA kernels, CUDA graphs (--device cuda{alone})"]
    missing += [] if mode.graphs else ["CUDA graphs (--graphs 1,2,4)"]
    return missing + ([] if mode.prefill_graphs else ["graphs of prefill (--prefill-graphs 16,64,256)"])


def _of_topic(topic: Dimension, mode: Mode) -> str:
    """What is to be left out of a mode in which no case has this topic; empty: some case has it."""
    if models := [name for name in RECIPES if topic.has(_smallest(name))]:
        return min((_of_recipe(name, mode) for name in models), key=len)
    return _left_out([name for name in topic.modes if getattr(mode, name) != getattr(CPU, name)])


def _of_recipe(model: str, mode: Mode) -> str:
    """The least that is to be left out of a mode so that it runs a case of this recipe; empty: it runs some."""
    given = [name for name in _OPTIONS if getattr(mode, name) != getattr(CPU, name)]
    sets = (names for number in range(len(given) + 1) for names in combinations(given, number))
    return next(_left_out(names) for names in sets if runs_in(_smallest(model), _without(mode, names)))


def _smallest(model: str) -> Case:
    return Case(name="smallest", model=model, num_steps=1, requests=(Request(id="a", prompt=(0,), max_new_tokens=1),))


def _without(mode: Mode, names: Collection[str]) -> Mode:
    """The mode without these options, and without those that come with a GPU if that is one of them."""
    names = {*names, *(("graphs", "prefill_graphs", "attention", "gpu") if "device" in names else ())}
    return replace(mode, **{name: getattr(CPU, name) for name in names})


def _left_out(names: Collection[str]) -> str:
    said = [f"without --{name}" if name != "graphs" else "with --graphs none" for name in names]
    return f" {' and '.join(said)}" if said else ""
