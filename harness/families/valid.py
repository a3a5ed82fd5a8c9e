"""Which cases the recipes admit and the modes run, and the cases and traces of strangers read and checked by that.

core/case.py says what a case looks like, field by field; each dimension has the rules that tie its fields to others and to the
model.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from eagletwin.harness.core.case import (
    MAX_FILE_BYTES,
    SCHEMA,
    Case,
    Request,
    Sampling,
    SGLangSettings,
    expand_samples,
)
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.files import read_input, refuse_duplicates
from eagletwin.harness.core.run_spec import FLASHINFER_HEAD, FLASHMLA_PAGE, Attention, Mode, mode_of_case
from eagletwin.harness.core.terminal import count, nearest

from . import RECIPES, family_of
from .deepseek_dsa import CHOSEN_AT_ONCE
from .dimensions import DIMENSIONS, FEATURES
from .recipe import Recipe

if TYPE_CHECKING:
    from eagletwin.harness.core.trace import Trace

# What of a case several ranks run that share the work of each layer (`--tp`).


def not_on_ranks(case: Case, ranks: int) -> str:
    """Why so many ranks do not run this case; empty if they do."""
    recipe, settings = RECIPES[case.model], case.engine.sglang
    if recipe.kv_heads % ranks:
        return f"{case.model} has {count(recipe.kv_heads, 'KV head')}, which cannot be divided among {ranks} ranks"
    if ranks > 1 and (why := _not_with(case, "tp")):
        return why
    if ranks > 1 and settings.update_weights.startswith("distributed"):
        return "weights that another process broadcasts, to several ranks: not tried"
    return ""


# What of a case a pipeline runs: SGLang's stages with EAGLE, and what of them is judged.


def not_in_stages(case: Case, stages: int) -> str:
    """Why a pipeline of so many stages does not run this case; empty if it does."""
    recipe = RECIPES[case.model]
    if recipe.algorithm != "EAGLE" or recipe.mtp_layers or recipe.frozen:
        return "SGLang's stages run EAGLE with a head of one layer alone"
    if recipe.target.num_layers < stages:
        return f"its target has {count(recipe.target.num_layers, 'layer')}, and there are {stages} stages"
    if recipe.target.states or recipe.target.routed or recipe.window:
        return "of states, experts and windows a stage's own part is not judged"
    return _not_with(case, "pp")


_WHERE = {
    "pp": "in a pipeline",
    "dp": "with DP attention",
    "tp": "on several ranks",
    "device": "on a GPU",
    "dtype": "in bfloat16",
}


def _not_with(case: Case, option: str) -> str:
    """Why what the case has is not run with this option of a mode; empty if it is."""
    having = (one for one in DIMENSIONS.values() if option in one.modes and one.has(case))
    return next((f"{one.words} {_WHERE[option]}: {one.modes[option]}" for one in having), "")


def not_driven(case: Case, mode: Mode) -> str:
    """Why eagletwin does not run this case in this mode; empty if it does."""
    reasons = (
        _not_on_vllm if mode.engine == "vllm" else _not_on_sglang,
        _not_by_the_backend,
        _not_on_several,
        _not_on_a_gpu,
        _not_in_bfloat16,
    )
    return next((why for reason in reasons if (why := reason(case, mode))), "")


def _not_on_sglang(case: Case, mode: Mode) -> str:  # noqa: ARG001
    if case.engine.vllm is not None:
        return "settings of vLLM (engine.vllm) on SGLang: give --engine vllm, or leave them out"
    why = family_of(RECIPES[case.model]).not_on_sglang
    return f"{case.model} on SGLang: {why}" if why else ""


VLLM_BLOCK = 16  # rows of the smallest block of vLLM's Triton attention
VLLM_HOTTEST = 2  # temperature that its SamplingParams takes
# What a request may ask for there.
_ASKED_OF_VLLM = ("id", "prompt", "max_new_tokens", "arrive", "after", "stop", "sampling", "penalties", "logit_bias")


def _not_on_vllm(case: Case, mode: Mode) -> str:
    """What of a case vLLM's adapter does not run: chains of single heads, whose requests ask for tokens alone."""
    recipe, settings = RECIPES[case.model], case.vllm
    if not family_of(recipe).vllm_method:
        driven = [name for name, one in RECIPES.items() if family_of(one).vllm_method]
        return f"{case.model} on vLLM: its checkpoint is not tried there ({', '.join(driven)} run)"
    if case.topk > 1:
        return f"topk {case.topk} on vLLM: it drafts chains alone; use topk 1"
    if case.num_draft_tokens not in (0, case.num_steps + 1):
        return f"num_draft_tokens {case.num_draft_tokens} on vLLM: it verifies a chain of num_steps drafts; leave it out"
    if case.page_size % VLLM_BLOCK:
        return (
            f"page_size {case.page_size} on vLLM: blocks of its Triton attention have {VLLM_BLOCK} rows, or several times that"
        )
    if case.engine.sglang != SGLangSettings():
        return "settings of SGLang (engine.sglang) on vLLM: give those of engine.vllm in their place"
    if settings.async_scheduling and settings.model_runner == "v1":
        return "async_scheduling with model runner V1: not tried; use V2"
    if settings.eagle_config and not recipe.target.aux_layers:
        return f"eagle_config with {case.model}: its head names no layers; leave it out"
    if mode != Mode(engine="vllm"):
        return f"{' '.join(mode.options)}: vLLM runs on a CPU, in float32, as one process, without graphs or overlap"
    plain = Request(id="a", prompt=(0,), max_new_tokens=1)
    for request in case.requests:
        asked = (name for name in Request.__struct_fields__ if getattr(request, name) != getattr(plain, name))
        if other := next((name for name in asked if name not in _ASKED_OF_VLLM), ""):
            return f"{other} of request {request.id!r} on vLLM: not driven yet; leave it out"
        if settings.model_runner == "v1" and request.logit_bias:
            return f"logit_bias of request {request.id!r} with model runner V1: its verify leaves it out; use V2"
        if request.sampling is not None and (why := _not_sampled_by_vllm(case, request.sampling)):
            return f"sampling of request {request.id!r} on vLLM: {why}"
        if not request.max_new_tokens:
            return f"request {request.id!r} of no new tokens on vLLM: it wants one at least"
        length = len(request.prompt) + request.max_new_tokens + case.num_steps + 1
        room = settings.num_gpu_blocks * case.page_size
        if length > (most := min(room, settings.max_model_len or room)):
            limit = "num_gpu_blocks leave" if most == room else "max_model_len leaves"
            return f"request {request.id!r} has {length} rows with its last round, and {limit} room for {most}"
    kind = next((event.kind for event in case.events if event.kind != "abort" or event.step), "")
    return f"event {kind!r} on vLLM: not driven yet; leave it out" if kind else ""


def _not_sampled_by_vllm(case: Case, sampling: Sampling) -> str:
    if case.vllm.model_runner == "v1":
        return "not driven with model runner V1 yet; use V2"
    if sampling.temperature > VLLM_HOTTEST:
        return f"it refuses a temperature over {VLLM_HOTTEST}"
    if sampling.min_p and sampling.top_p < 1:
        return "it cuts by min_p before it cuts by top_p, and SGLang after; give one of them"
    if case.rejection_sampling and (sampling.top_k == 1 or RECIPES[case.model].draft_vocab_size is not None):
        return "probabilistic drafts with top_k 1, or of a draft with a vocabulary of its own: not tried; use greedy ones"
    return ""


def runs_in(case: Case, mode: Mode) -> bool:
    """Whether a search in this mode draws such a case: eagletwin runs it, and SGLang starts."""
    mode = mode_of_case(mode, case.engine.sglang)
    # SGLang's graphs do not start with it: it has a place for one token of each request, and verify has several
    in_torch = bool(mode.graphs) and bool(case.adapters) and case.engine.sglang.lora_backend == "torch_native"
    # in each such case standalone-shift shows, whose candidate fix gives Triton's backend one step more, and no other
    shifted = mode.attention != "triton" and RECIPES[case.model].algorithm == "STANDALONE"
    return not in_torch and not shifted and not not_driven(case, mode)


# Attention backend -> what of a case it does not run, and why. {0} is the case, {head} the width of its narrowest head.
_LIMITS: dict[Attention, tuple[tuple[Callable[[Case, Recipe], object], str], ...]] = {
    "fa3": (
        (lambda _, recipe: recipe.frozen, "{0.model} with FlashAttention 3: SGLang's class of Gemma-4 refuses it"),
        (
            lambda case, _: case.engine.sglang.draft_window,
            "draft_window with FlashAttention 3: SGLang's draft decode has none there",
        ),
        (
            lambda case, recipe: case.topk > 1 and case.page_size > 1 and recipe.target.windows,
            "{0.model} with FlashAttention 3, topk {0.topk} and pages of {0.page_size}: SGLang refuses windows there",
        ),
    ),
    "flashinfer": (
        (
            lambda _, recipe: recipe.narrowest_head < FLASHINFER_HEAD,
            "{0.model} with FlashInfer: its heads are {head} wide, and FlashInfer's kernels take "
            f"{FLASHINFER_HEAD} and more (llama-wide has such heads)",
        ),
    ),
    "flashmla": (
        (
            lambda case, recipe: recipe.target.latent is None or case.topk > 1 or case.page_size != FLASHMLA_PAGE,
            "{0.model} with FlashMLA, topk {0.topk} and pages of {0.page_size}: it takes latent attention, chains and pages of "
            f"{FLASHMLA_PAGE} (deepseek-nextn-wide has such attention)",
        ),
    ),
}


def _not_by_the_backend(case: Case, mode: Mode) -> str:
    recipe = RECIPES[case.model]
    if recipe.target.index is not None and mode.prefill_graphs:
        return f"{case.model} in prefill graphs: not tried"
    if recipe.target.compressed is not None:
        if mode.dtype != "bfloat16":
            return f"{case.model} in {mode.dtype}: SGLang's kernels of its backend know bfloat16 alone; give --dtype bfloat16"
        if mode.prefill_graphs or (mode.graphs and mode.device == "cpu"):
            return f"{case.model} in prefill graphs, or in CUDA graphs on a CPU: not tried"
    if mode.attention != "triton" and (recipe.target.index or recipe.target.compressed):
        return f"{case.model} with {mode.attention}: it has a backend of its own; leave --attention out"
    on_cpu = (mode.device, mode.attention) == ("cpu", "fa3")
    if mode.attention != "triton" and not on_cpu and (mode.device == "cpu" or mode.dtype == "float32"):
        return f"attention backend {mode.attention} with {mode.device} and {mode.dtype}: it needs cuda and bfloat16"
    limits = _LIMITS.get(mode.attention, ())
    why = next((why for excludes, why in limits if excludes(case, recipe)), "")
    return why.format(case, head=recipe.narrowest_head)


def _not_on_several(case: Case, mode: Mode) -> str:
    if mode.graphs and mode.device == "cpu" and mode.tp * mode.pp > 1:
        return "CUDA graphs on a CPU, on several ranks or in stages: not tried"
    if mode.dp > 1 and (why := _not_with(case, "dp")):
        return why
    if mode.pp > 1 and (mode.device == "cuda" or mode.tp > 1 or mode.overlap):
        return "a pipeline on a GPU, of several ranks a stage, or with overlap: not tried"
    if mode.pp > 1 and (why := not_in_stages(case, mode.pp)):
        return f"a pipeline of {case.model}: {why}"
    return not_on_ranks(case, mode.tp)


def _not_on_a_gpu(case: Case, mode: Mode) -> str:
    settings = case.engine.sglang
    if mode.device == "cpu":
        return ""
    if RECIPES[case.model].target.clamped is not None and mode.dtype == "float32":
        return f"{case.model} on a GPU: SGLang's kernels of its experts know bfloat16 alone there"
    if (index := RECIPES[case.model].target.index) is not None:
        if index.chosen % CHOSEN_AT_ONCE:
            return (
                f"{case.model} on a GPU: FlashMLA's prefill takes a multiple of {CHOSEN_AT_ONCE} chosen rows, and this recipe "
                f"chooses {index.chosen} (deepseek-dsa-wide chooses {CHOSEN_AT_ONCE})"
            )
        if mode.dtype == "float32":
            return f"{case.model} on a GPU: FlashMLA's kernels know bfloat16 alone there"
    if settings.update_weights.startswith("distributed"):
        return "weights that another process broadcasts, on a GPU: not tried"
    return _not_with(case, "device")


def _not_in_bfloat16(case: Case, mode: Mode) -> str:
    target = RECIPES[case.model].target
    if mode.dtype == "float32":
        return ""
    if target.chooses and mode.graphs:
        return (
            f"{case.model} in bfloat16 in graphs: within its bound many choices of experts are ties, and in a graph nobody "
            "sees how they were decided"
        )
    if target.states:
        return f"{case.model} in bfloat16: how far off a layer's state may be is known in float32 alone"
    if why := _not_with(case, "dtype"):
        return why
    if case.engine.sglang.plain_decode and target.routed:
        return "plain decode of experts in bfloat16: within the bound it may send a row to others than verify does"
    return ""


def _refuse(cause: str, remedy: str) -> InputError:
    return InputError(cause, consequence="nothing was run and nothing was written", remedy=remedy)


def read_case(path: Path) -> Case:
    """The case in a file. Raises InputError for anything that is not a valid case."""
    try:
        data = read_input(path, MAX_FILE_BYTES)
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
    try:
        refuse_duplicates(data)
    except ValueError as error:
        raise _refuse(f"{origin}: {error}", "leave one of the two out") from error
    schema = raw.get("schema", SCHEMA) if isinstance(raw, dict) else SCHEMA
    if isinstance(schema, int) and schema > SCHEMA:
        raise _refuse(
            f"{origin}: case schema {schema}; this eagletwin reads up to {SCHEMA}", "use the eagletwin that wrote it, or newer"
        )
    try:
        case = msgspec.convert(raw, Case)
    except msgspec.ValidationError as error:
        raise _refuse(f"{origin}: {error}", "correct the field; docs/reference/case.md lists all of them") from error
    check_case(case, origin)
    return case


def check_model(model: str, origin: str) -> None:
    """Raises InputError if no recipe has this name."""
    if model not in RECIPES:
        raise InputError(
            f"{origin}: no model recipe is called {model!r}",
            consequence="nothing was run: this architecture is not covered, and no verdict can be given on its arithmetic",
            remedy=f"{nearest(model, RECIPES)}; all run the same scheduler, worker, trees and commits: "
            "docs/guide/acceptance-fell.md says what can be asked about other models",
        )


# by whether their rules are of the requests that the scheduler is sent
_IN_ORDER = {of_sent: [one for one in DIMENSIONS.values() if one.of_sent == of_sent] for of_sent in (False, True)}


def check_case(case: Case, origin: str) -> None:
    """The rules that tie fields together. Raises InputError."""
    if case.schema != SCHEMA:
        raise _refuse(f"{origin}: case schema {case.schema} does not exist", f"set it to {SCHEMA}")
    check_model(case.model, origin)
    unknown = [feature for feature in case.exercises if feature not in FEATURES]
    if unknown:
        raise _refuse(f"{origin}: exercises {unknown[0]!r} is not known", nearest(unknown[0], FEATURES))
    for of_sent, dimensions in _IN_ORDER.items():
        judged = expand_samples(case) if of_sent else case
        for dimension in dimensions:
            for cause, remedy in dimension.refusals(judged):
                raise _refuse(f"{origin}: {cause}", remedy)


def admits(case: Case) -> bool:
    """Whether an engine would be given this case."""
    try:
        check_case(case, case.name)
    except InputError:
        return False
    return True


# Traces of strangers: their digests are right, and their case is one that the recipes admit.


def read_trace(folder: Path) -> "Trace":
    """The trace in a folder. Raises InputError, naming the file, if it is absent, truncated, edited or of another schema, or if
    its case is not valid."""
    from eagletwin.harness.core.trace import load_trace  # it takes torch, which no case does

    return load_trace(folder, check_case)


def strangers_trace(folder: Path) -> "Trace":
    """The same of a trace that no engine of this process has just written. Raises InputError for a key that is given twice
    too: msgspec takes the last, and the digest is of both."""
    from eagletwin.harness.core.trace import HEADER, MAX_HEADER_BYTES

    trace = read_trace(folder)
    for file in sorted(folder.rglob(HEADER)):
        try:
            refuse_duplicates(read_input(file, MAX_HEADER_BYTES))
        except ValueError as error:
            raise InputError(
                f"{file}: {error}", consequence="the trace was not judged", remedy="record the trace again"
            ) from error
    return trace
