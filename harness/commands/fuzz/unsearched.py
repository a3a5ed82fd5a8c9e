"""Features by which a search is narrowed, and what it left out of them: each with the option that adds it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from msgspec.structs import replace

from eagletwin.cases.strategies import CONTEXT_LENGTHS, SMALL_TREE, TOPKS, WEIGHT_UPDATES
from eagletwin.harness.core.case import Case, Request
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.mode import CPU, Mode
from eagletwin.harness.core.terminal import nearest
from eagletwin.harness.families import FAMILIES, RECIPES
from eagletwin.harness.families.modes import runs_in
from eagletwin.harness.families.windows import ENDING


@dataclass(frozen=True, slots=True)
class Topic:
    """A feature that users run. key: what `--only` and `--not` call it; has: whether a case has it."""

    key: str
    name: str
    has: Callable[[Case], bool]


def _layers(case: Case) -> bool:
    return RECIPES[case.model].mtp_layers > 0


def _rejects(case: Case) -> bool:
    return case.engine.sglang.rejection_sampling


def _thresholds(case: Case) -> bool:
    return min(case.engine.sglang.accept_single, case.engine.sglang.accept_acc) < 1


def _cuts_by_min_p(case: Case) -> bool:
    return any(request.sampling is not None and request.sampling.min_p > 0 for request in case.requests)


def _by_llguidance(case: Case) -> bool:
    return case.constrains and case.engine.sglang.grammar_backend == "llguidance"


TOPICS: tuple[Topic, ...] = (
    Topic("chains", "chains", lambda case: case.topk == 1),
    Topic("trees", "trees", lambda case: case.topk > 1),
    Topic("eagle", "EAGLE-1/2", lambda case: RECIPES[case.model].algorithm == "EAGLE" and not _layers(case)),
    Topic("eagle3", "EAGLE-3", lambda case: RECIPES[case.model].algorithm == "EAGLE3"),
    Topic("plain-draft", "plain draft models", lambda case: not RECIPES[case.model].reads_states),
    Topic("layers", "multi-layer drafts", _layers),
    Topic("latent", "latent attention", lambda case: RECIPES[case.model].target.latent is not None),
    Topic("experts", "experts", lambda case: bool(RECIPES[case.model].target.routed)),
    Topic("windows", "windows that end", lambda case: 0 < RECIPES[case.model].window <= ENDING),
    Topic("states", "layers that keep a state", lambda case: RECIPES[case.model].target.states > 0),
    Topic("draft-windows", "windows of draft decode", lambda case: case.engine.sglang.draft_window > 0),
    Topic("sampling", "requests that sample", lambda case: case.samples),
    Topic("rejection", "rejection sampling", _rejects),
    Topic("context-end", "the end of a context", lambda case: case.engine.sglang.context_length > 0),
    Topic("small-trees", "trees with fewer nodes than their longest path", lambda case: case.verify_nodes <= case.num_steps),
    Topic("updates", "updated weights", lambda case: bool(case.engine.sglang.update_weights)),
    Topic("thresholds", "acceptance thresholds", _thresholds),
    Topic("mixed-chunks", "mixed chunks", lambda case: case.engine.sglang.mixed_chunks),
    Topic("host-cache", "a hierarchical cache", lambda case: case.engine.sglang.host_pages > 0),
    Topic("adaptive", "adaptive steps", lambda case: case.engine.sglang.adaptive is not None),
    Topic("plain-decode", "plain decode", lambda case: case.engine.sglang.plain_decode),
    Topic("deterministic", "deterministic inference", lambda case: case.engine.sglang.deterministic),
    Topic("stream", "tokens sent as they come", lambda case: any(request.stream for request in case.requests)),
    Topic("min-p", "min_p", _cuts_by_min_p),
    Topic("logit-bias", "biased logits", lambda case: any(request.logit_bias for request in case.requests)),
    Topic("processor", "custom logit processors", lambda case: case.processes),
    Topic("penalties", "penalties", lambda case: any(request.penalties is not None for request in case.requests)),
    Topic("grammar", "grammars", lambda case: case.constrains),
    Topic("llguidance", "grammars by llguidance", _by_llguidance),
    Topic("logprobs", "logprobs", lambda case: any(request.logprobs is not None for request in case.requests)),
    Topic("min-new-tokens", "min_new_tokens", lambda case: any(request.min_new_tokens for request in case.requests)),
    Topic("hidden-states", "hidden states", lambda case: case.gives_states != ""),
    Topic("sessions", "streaming sessions", lambda case: bool(case.sessions)),
    Topic("samples", "several samples of a prompt", lambda case: any(request.n > 1 for request in case.requests)),
    Topic("adapters", "adapters (LoRA)", lambda case: bool(case.adapters)),
    Topic("aborts-in-step", "aborts inside a step", lambda case: any(event.step for event in case.events)),
)
_BY_KEY = {topic.key: topic for topic in TOPICS}
# Names of one value of a setting: a field of cases.strategies.Focus, and the value.
VALUES: Mapping[str, tuple[str, Any]] = {
    **{f"topk={topk}": ("topk", topk) for topk in TOPKS},
    **{f"context-length={length}": ("context_length", length) for length in sorted(filter(None, CONTEXT_LENGTHS))},
    **{f"updates={how}": ("update_weights", how) for how in WEIGHT_UPDATES if how},
}
# Topics and values that a block is drawn with, in place of being drawn until it has them.
_HELD: Mapping[str, tuple[str, Any]] = {"chains": ("topk", TOPKS[0]), "small-trees": ("tree_size", SMALL_TREE), **VALUES}
# Of those that are no recipe's: what a pipeline runs (families/modes.py).
_IN_STAGES = (
    *("trees", "draft-windows", "sampling", "context-end", "small-trees", "thresholds", "mixed-chunks", "deterministic"),
    *("stream", "min-p", "logit-bias", "processor", "penalties", "logprobs", "min-new-tokens", "hidden-states", "samples"),
)
# And what several ranks, a GPU and bfloat16 do not run (families/modes.py).
_NOT_ON_RANKS = ("plain-decode",)
_NOT_ON_A_GPU = ("plain-decode",)
_NOT_IN_BFLOAT16 = ("adapters",)
# Options, and fields of Mode, without which a case may run that does not with them.
_OPTIONS = ("pp", "tp", "dtype", "attention", "graphs", "device")


def topics_of(case: Case) -> tuple[str, ...]:
    """The names of the topics that a case has."""
    return tuple(topic.name for topic in TOPICS if topic.has(case))


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
    missing = [f"{topic.name} (--only {topic.key}{_of_topic(topic, mode)})" for topic in TOPICS if topic.name not in topics]
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


def _of_topic(topic: Topic, mode: Mode) -> str:
    """What is to be left out of a mode in which no case has this topic; empty: some case has it."""
    if models := [name for name in RECIPES if topic.has(_smallest(name))]:
        return min((_of_recipe(name, mode) for name in models), key=len)
    runs = {
        "pp": topic.key in _IN_STAGES,
        "tp": topic.key not in _NOT_ON_RANKS,
        "device": topic.key not in _NOT_ON_A_GPU,
        "dtype": topic.key not in _NOT_IN_BFLOAT16,
    }
    return _left_out([name for name in runs if getattr(mode, name) != getattr(CPU, name) and not runs[name]])


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
