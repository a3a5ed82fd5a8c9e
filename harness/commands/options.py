"""What commands share: panels of --help, a line of progress, and how options become a mode."""

import inspect
import os
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer
from msgspec.structs import replace

from eagletwin.cases.ledger import patches_of
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.files import check_writable
from eagletwin.harness.core.run_spec import (
    DEFAULT_LIMITS,
    DEFAULT_RUN,
    ENGINES,
    Attention,
    Dtype,
    Engine,
    Kernels,
    Limits,
    Mode,
    RunSpec,
    chosen_engine,
)
from eagletwin.harness.core.verdict import View
from eagletwin.harness.judge.rules import rules_off

# Panels of --help. The options of one command alone are in panels of its own, or in "Options".
ENGINE, JUDGE, OUTPUT = "Engine: what runs", "Judge", "Output and limits"

DEFAULT_GRAPHS = None  # GRAPHS on a GPU, none on a CPU
GRAPHS = "1,2,4"
DEFAULT_RUNS = Path("eagletwin-runs")


def log_progress(text: str) -> None:
    """Progress: to stderr, as it comes."""
    print(text, file=sys.stderr, flush=True)


def nothing_run(cause: str, remedy: str) -> InputError:
    """The error of what was typed and cannot be run."""
    return InputError(cause, consequence="nothing was run", remedy=remedy)


def let_threads_sleep() -> None:
    """Call this before torch is imported, which reads the variable: its threads then sleep while they wait for each other.

    They meet hundreds of times in a forward of a small model. Threads that wait busily burn a core each, and take five times as
    long where other programs run too.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def mode_of(
    device: str,
    graphs: str | None,
    overlap: bool | None,
    tp: int = 1,
    dtype: Dtype = "float32",
    attention: Attention = "triton",
    prefill_graphs: str | None = None,
    pp: int = 1,
) -> Mode:
    """How the worker is to be driven. Raises InputError for invalid sizes, for attention or ranks that cannot run, and for a
    missing GPU."""
    check_attention(attention, device, dtype)
    check_ranks(tp)
    check_stages(pp, device, tp, overlap=bool(overlap))
    prefill = _sizes("--prefill-graphs", prefill_graphs or "none", "token counts", "16,64")
    usual = GRAPHS if device == "cuda" or prefill else "none"
    sizes = _sizes("--graphs", usual if graphs is None else graphs, "batch sizes", "1,2,4")
    if prefill and not sizes:
        raise nothing_run(
            f"--prefill-graphs {prefill_graphs} with --graphs none: both are captured, or neither", "leave one of them out"
        )
    if device == "cpu":
        return Mode(graphs=sizes, prefill_graphs=prefill, overlap=bool(overlap), tp=tp, dtype=dtype, pp=pp, attention=attention)
    must_have_cuda(tp, attention)
    return Mode(
        device="cuda",
        graphs=sizes,
        prefill_graphs=prefill,
        overlap=overlap is not False,
        tp=tp,
        dtype=dtype,
        attention=attention,
    )


def _sizes(option: str, given: str, what: str, such: str) -> tuple[int, ...]:
    """For what graphs are captured: an ascending list, or `none`. Raises InputError."""
    if given == "none":
        return ()
    sizes = tuple(sorted({int(size) for size in given.split(",") if size.isdigit() and int(size)}))
    if not sizes or ",".join(map(str, sizes)) != given:
        raise nothing_run(f"{option} {given}: not an ascending list of {what}", f"give sizes such as {such}, or none")
    return sizes


def check_attention(attention: Attention, device: str, dtype: Dtype) -> None:
    """Raises InputError for kernels of attention where they cannot run: a GPU's, which know 16 bits and less. A CPU has torch
    in the place of FlashAttention's."""
    if attention != "triton" and (device, attention) != ("cpu", "fa3") and (device != "cuda" or dtype != "bfloat16"):
        asked = "--device cpu" if device != "cuda" else f"--dtype {dtype}"
        raise nothing_run(
            f"--attention {attention} with {asked}: its kernels run on a GPU, and know no float32",
            "give --device cuda --dtype bfloat16, or leave --attention out: the Triton backend runs everywhere",
        )


def check_kernels(kernels: Kernels, mode: Mode) -> None:
    """Raises InputError for a kernel runtime that would not run, or not with this type."""
    if mode.device == "cuda" and kernels != "fast":
        raise nothing_run(
            f"--kernels {kernels} with --device cuda: on a GPU Triton compiles the kernels, and no runtime of eagletwin's runs",
            "leave --kernels out, or use --device cpu",
        )
    if mode.dtype == "bfloat16" and kernels in ("interpreter", "shadow"):
        raise nothing_run(
            f"--kernels {kernels} with --dtype bfloat16: Triton's interpreter computes with the bits of bfloat16 as if they "
            "were integers",
            "use --kernels fast or checked",
        )


def check_ranks(tp: int) -> None:
    """Raises InputError for ranks among which no model's KV heads can be shared out."""
    from eagletwin.harness.families import RECIPES

    heads = {recipe.kv_heads for recipe in RECIPES.values()}
    if all(number % tp for number in heads):
        possible = [str(ranks) for ranks in range(1, max(heads) + 1) if any(number % ranks == 0 for number in heads)]
        raise InputError(
            f"--tp {tp}: KV heads are divided evenly among ranks, and eagletwin's models have {max(heads)}",
            consequence="nothing was run; the limit is eagletwin's, whose models are tiny, and not the engine's",
            remedy=f"use --tp {' or '.join(possible)}",
        )


def check_stages(pp: int, device: str, tp: int, *, overlap: bool) -> None:
    """Raises InputError for a pipeline beside what it is not driven with."""
    if pp == 1:
        return
    beside = "--device cuda" if device == "cuda" else f"--tp {tp}" if tp > 1 else "--overlap" if overlap else ""
    if beside:
        raise nothing_run(
            f"--pp {pp} with {beside}: pipelines are driven on a CPU, of one rank a stage, without overlap",
            f"leave {beside.partition(' ')[0]} or --pp out",
        )
    from eagletwin.harness.families import RECIPES

    most = max(recipe.target.num_layers for recipe in RECIPES.values())
    if pp > most:
        raise InputError(
            f"--pp {pp}: each stage has a layer of the target, and eagletwin's models have {most} at most",
            consequence="nothing was run; the limit is eagletwin's, whose models are tiny, and not the engine's",
            remedy=f"use --pp {most} or less",
        )


def must_have_cuda(gpus: int = 1, attention: Attention = "triton") -> None:
    """Raises InputError that says what the CUDA engine lacks here."""
    from eagletwin.harness.engines.machine import missing_for_cuda

    missing = missing_for_cuda(gpus, attention)
    if missing:
        raise InputError(
            missing[0], consequence="nothing was run: a CUDA engine needs it", remedy=f"{missing[1]} (docs/guide/gpu.md)"
        )


# The options that commands share, as Typer reads them: those that name a run, and those of a search.
#
# A command is decorated with `run_options` and the groups of options that it knows. Those of a run that are no parameters of
# its own are in its `spec: RunSpec`.


Command = Callable[..., object]
Names = list[str] | None


class Option(NamedTuple):
    """An option of a command. name: of the parameter; kind: its type, and what Typer reads of it; usual: its default."""

    name: str
    kind: Any
    usual: Any


def option(
    panel: str, name: str, kind: Any, usual: Any, metavar: str = "", *words: str, **more: Any
) -> Callable[[str], Option]:
    """An option without its text. panel: of --help; words: how it is typed, if not by its name; more: for typer.Option."""

    def with_help(help: str) -> Option:
        read = typer.Option(*words, metavar=metavar or None, rich_help_panel=panel or None, help=help, **more)
        return Option(name, Annotated.__class_getitem__((kind, read)), usual)  # type: ignore[attr-defined]

    return with_help


def flag(panel: str, name: str) -> Callable[[str], Option]:
    """An option without a value."""
    return option(panel, name, bool, False, "", f"--{name}")


OUT = option(OUTPUT, "out", Path, DEFAULT_RUNS, "FOLDER", callback=check_writable)(
    "Folder for run folders. Nothing is overwritten."
)
JSON = option(OUTPUT, "as_json", bool, False, "", "--json")("Print JSON.")
VERBOSE = flag(OUTPUT, "verbose")("Print the whole report.")

# Those that name a run.

CHANGES = (
    option(ENGINE, "revert", Names, None, "PR")("Undo this fix of the ledger, in memory. Repeatable."),
    option(ENGINE, "remedy", Names, None, "ENTRY")("Apply the candidate fix of a live bug, in memory. Repeatable."),
    option(ENGINE, "patch", list[Path] | None, None, "FILE")(
        "Apply this diff or these edits (JSON), without changing the installed release. Repeatable."
    ),
)
JUDGING = (
    option(JUDGE, "without", Names, None, "RULE")("Switch a rule off. Repeatable."),
    option(JUDGE, "view", View, DEFAULT_RUN.view, "VIEW")(
        "How to judge three known deviations of the engine. `slot_layout`, `last_fed`: accept two approximations. "
        "`true_tree`: report a node of a draft tree that attends to anything but its own ancestors (ledger entry 8409). "
        "`committed`: report a row of a multi-layer draft that did not consume the committed token (entry boundary-kv). "
        "`shifted`: accept that a plain draft model is run on x[1..] (entry standalone-shift)."
    ),
)
STRICT = (flag(JUDGE, "strict")("Exit with 125 if a changed statement of the tree or a patch did not run."),)
REPEAT = (
    option(JUDGE, "repeat", int, 1, "N", min=1)(
        "Run the case this many times before it counts as equal: for faults that read unwritten memory, and races."
    ),
)
SOURCE = (
    option(ENGINE, "sglang", str, "", "RELEASE|PATH", show_default=False)(
        "Run this SGLang: a published release, or a source tree. Default: the installed one."
    ),
)
WHICH_TEXT = "The engine that runs: `sglang`, the default, or `vllm` (docs/guide/vllm.md has what is covered)."
WHICH = (
    option(ENGINE, "engine", Engine | None, None, "ENGINE", show_default=False)(WHICH_TEXT),
    option(ENGINE, "vllm", str, "", "RELEASE|PATH", show_default=False)(
        "Run this vLLM: a published release, or a source tree. Default with --engine vllm: the newest known release."
    ),
)
KERNELS = (
    option(ENGINE, "kernels", Kernels, "fast", "RUNTIME")(
        "The runtime of Triton kernels on a CPU. `fast`: the runtime of eagletwin. `interpreter`: Triton's own. "
        "`shadow`: both, compared launch by launch. `checked`: the fast runtime runs each launch three times, to find "
        "undefined values and races."
    ),
)
OVERLAP = option(ENGINE, "overlap", bool | None, None, "", "--overlap/--no-overlap")(
    "The release's overlap scheduler. Default: on for a GPU, off for a CPU."
)
RANKS = option(ENGINE, "tp", int, 1, "N", min=1)("Ranks of tensor parallelism, a GPU each. Every rank is judged.")
DTYPE = option(ENGINE, "dtype", Dtype, "float32", "TYPE")(
    "Data type of the worker: `float32`, or `bfloat16`: the type of production, in which more choices are ties."
)
ATTENTION = option(ENGINE, "attention", Attention, "triton", "BACKEND")(
    "The attention backend: `triton`; `fa3` (FlashAttention 3, on a Hopper GPU with --dtype bfloat16, or on a CPU); or, "
    "with --device cuda and --dtype bfloat16, `flashinfer` (for models with heads of 64 and more, such as llama-wide) or "
    "`flashmla` (for chains of models with latent attention, in pages of 64)."
)
HOW = (
    *KERNELS,
    option(ENGINE, "device", Literal["cpu", "cuda"], "cpu", "DEVICE")("Where the worker runs: `cpu` or `cuda`."),
    option(ENGINE, "graphs", str | None, DEFAULT_GRAPHS, "SIZES", show_default=False)(
        "Batch sizes for which CUDA graphs are captured, such as 1,2,4, the default on a GPU; on a CPU as the case has it. "
        "A larger batch runs without a graph. `none`: no graphs."
    ),
    option(ENGINE, "prefill_graphs", str | None, None, "SIZES", show_default=False)(
        "Token counts, such as 16,64, for which graphs of prefill are captured too. Default: none."
    ),
    OVERLAP,
    RANKS,
    option(ENGINE, "pp", int, 1, "N", min=1)(
        "Stages of pipeline parallelism, on a CPU: a process each. The last one, which drafts and verifies, is judged."
    ),
    DTYPE,
    ATTENTION,
)
_STEP = "Time limit for one stage of one scheduler iteration."
LIMITS = (
    option(OUTPUT, "step_timeout", float, DEFAULT_LIMITS.step, "SECONDS", min=0.1)(_STEP),
    option(OUTPUT, "case_timeout", float, DEFAULT_LIMITS.case, "SECONDS", min=0.1)("Time limit for a whole case."),
)

# Those of a search.

MINUTES, SHRINK_MINUTES, MAX_CASES = 5.0, 3.0, 1_000_000
_SEARCH, _WHERE, _CASES = "Search", "Where it runs", "Cases"
SEED = option(_SEARCH, "seed", int, 0, "N", min=0)("The same seed draws the same cases.")
SEARCH = (
    option(_SEARCH, "minutes", float, MINUTES, "MINUTES", min=0.01)(
        "Time limit of the search, with the import of the engine. Shrinking has its own limit, --shrink-minutes. A case that "
        "is running when time is up runs to its end."
    ),
    option(_SEARCH, "max_cases", int, MAX_CASES, "N", "--cases", min=1)(
        "Limits the generated cases; shrinking runs do not count. Four cases mostly share one configuration."
    ),
    SEED,
    option(_SEARCH, "findings", int, 1, "N", min=0)(
        "End after this many different findings; 0: when the time is up. Findings differ by rule, stage, layer or kernel; "
        "crashes by exception and function."
    ),
    option(_SEARCH, "shrink_minutes", float, SHRINK_MINUTES, "MINUTES", min=0.0)(
        "Time limit of shrinking each finding, independent of --minutes. The smallest case by then is reported, after "
        "three confirming runs."
    ),
    option(_WHERE, "processes", int, 0, "N", "--workers", "-n", min=0, show_default=False)(
        "Processes that run cases, or workers of the cluster with --address. Default: one per core, as memory "
        "allows. A seed gives the same cases and the same result for any number, unless a change directs the search."
    ),
    option(_WHERE, "address", str, "", "ADDRESS", show_default=False)(
        "Run cases on a Ray cluster as well: HOST:PORT, or `auto` for the cluster of this machine."
    ),
    option(_WHERE, "resume", Path | None, None, "FOLDER")(
        "Continue the search of this run folder, with its options. --minutes, --cases, --findings and --shrink-minutes "
        "set new limits for the whole search."
    ),
    option(_SEARCH, "shrink", Path | None, None, "CASE")(
        "Do not search: shrink this case file further, whose time was up. --shrink-minutes limits it."
    ),
    flag(_SEARCH, "watch")(
        "Search the source tree again each time that a file of it is saved: first the cases that ran what is changed, and "
        "what was found last. One line for each save has the verdict; Ctrl-C ends with the last one's exit code."
    ),
    flag(_SEARCH, "explain")(
        "If nothing is found, report the smallest case in which the change alters a recorded value, with both values. "
        "--shrink-minutes limits it.",
    ),
    option(_CASES, "only", Names, None, "FEATURE")(
        "Draw only cases with this feature, or with one of a comma-separated list: a topic such as trees, sampling or "
        "grammar, a value such as topk=4, context-length=16 or updates=disk, a model recipe or a family. Repeatable: cases "
        "then have all of them. docs/guide/fuzz.md lists the features."
    ),
    option(_CASES, "left_out", Names, None, "FEATURE", "--not")("No cases with this feature. Repeatable."),
)


def run_options(*groups: tuple[Option, ...]) -> Callable[[Command], Command]:
    """Give a command these options; `--help` has them in this order, after the parameters that no group has."""
    options = {one.name: one for group in groups for one in group}

    def decorate(command: Command) -> Command:
        own, keyword = inspect.signature(command).parameters, inspect.Parameter.KEYWORD_ONLY
        further = {one.name for one in own.values() if one.kind is inspect.Parameter.VAR_KEYWORD}
        in_spec = {name for name in options if name not in own and "spec" in own and name in _OF_RUN}

        @wraps(command)
        def wrapper(*args: Any, **kwargs: Any) -> object:
            given = {name: kwargs.pop(name, one.usual) for name, one in options.items()}
            named = {name: value for name, value in given.items() if name not in in_spec}
            first = {"engine": given["engines"][0].value} if given.get("engines") else {}  # of several that a command runs
            spec = {"spec": spec_of({name: given[name] for name in in_spec} | first)} if "spec" in own else {}
            return command(*args, **kwargs, **named, **spec)

        plain = [one.replace(kind=keyword) for name, one in own.items() if name not in {*options, *further, "spec"}]
        parameters = plain + [
            inspect.Parameter(one.name, keyword, default=one.usual, annotation=one.kind) for one in options.values()
        ]
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {one.name: one.annotation for one in parameters}
        return wrapper

    return decorate


_OF_RUN = {one.name for group in (CHANGES, JUDGING, STRICT, REPEAT, SOURCE, WHICH, HOW, LIMITS) for one in group}


def spec_of(given: dict[str, Any]) -> RunSpec:
    """The run that these options name; what is not given is at its default. Raises InputError before anything is imported."""
    changes = {name: given.get(name) or [] for name in ("revert", "remedy", "patch")}
    engine, named = chosen_engine(given.get("engine"), {engine: given.get(engine, "") for engine in ENGINES})
    files = [Path(file) for file in changes["patch"]]
    if files:
        from eagletwin.harness.engines.source import is_diff  # each command would pay for it as it starts

        if diffs := [file for file in files if is_diff(file)]:
            named = str(_with_diff(not given.keys().isdisjoint(ENGINES), named, diffs, engine))
            changes["patch"] = [str(file) for file in files if file not in diffs]
    how = {name: given[name] for name in ("tp", "pp", "dtype", "attention", "prefill_graphs") if name in given}
    mode = mode_of(given.get("device", "cpu"), given.get("graphs", DEFAULT_GRAPHS), given.get("overlap"), **how)
    mode = replace(mode, engine=engine)
    check_kernels(given.get("kernels", "fast"), mode)
    return RunSpec(
        release=named,
        mode=mode,
        kernels=given.get("kernels", "fast"),
        patches=patches_of(changes["revert"], changes["remedy"], [Path(file) for file in changes["patch"]], engine),
        changes=tuple(word for name, values in changes.items() for value in values for word in (f"--{name}", str(value))),
        without=rules_off(given.get("without")),
        view=given.get("view", DEFAULT_RUN.view),
        limits=Limits(step=given.get("step_timeout", DEFAULT_LIMITS.step), case=given.get("case_timeout", DEFAULT_LIMITS.case)),
        repeat=given.get("repeat", 1),
        strict=given.get("strict", False),
    )


def on_engine(spec: RunSpec, engine: Engine) -> RunSpec:
    """The same run, as that engine is released. Raises InputError for a run that names code or changes of one engine."""
    if spec.release or spec.patches:
        named = f"--{spec.mode.engine} {spec.release}" if spec.release else " ".join(spec.changes)
        raise nothing_run(f"{named} with two engines: it is of one", "leave it out, or give one --engine")
    return replace(spec, mode=replace(spec.mode, engine=engine))


def _with_diff(one: bool, name: str, diffs: list[Path], engine: Engine) -> Path:
    """The tree that the release of this name becomes with a unified diff. one: of a command that runs one release. Raises
    InputError."""
    if not one or len(diffs) > 1:
        several = "a command of several releases" if len(diffs) == 1 else "several diffs"
        raise nothing_run(
            f"{diffs[0]} is a diff, in {several}",
            f"apply it to a source tree and name that by --{engine}, or use edits: docs/reference/patch.md",
        )
    from eagletwin.harness.engines.source import patched_tree, resolve

    return patched_tree(resolve(name, engine), diffs[0])
