"""The options that name a run, or choose cases and limit a search, as Typer reads them.

A command takes `spec: RunSpec` and is decorated with `run_options` and the groups of options that it knows; Typer sees the
options in place of `spec`.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from eagletwin.cases.ledger import patches_of
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.run_spec import DEFAULT_LIMITS, DEFAULT_RUN, Limits, RunSpec
from eagletwin.harness.judge.rules import rules_off

from .options import (
    DEFAULT_GRAPHS,
    JUDGE,
    AttentionBackend,
    CaseSeconds,
    DataType,
    Device,
    Graphs,
    KernelRuntime,
    Overlap,
    PatchFiles,
    PrefillGraphs,
    Ranks,
    Remedies,
    Reverts,
    RulesOff,
    Sglang,
    Stages,
    StepSeconds,
    Views,
    check_kernels,
    mode_of,
)

Repeat = Annotated[
    int,
    typer.Option(
        "--repeat",
        metavar="N",
        min=1,
        rich_help_panel=JUDGE,
        help="Run the case this many times before it counts as equal: for faults that read unwritten memory, and races.",
    ),
]

# (name, what Typer reads of it, default)
Option = tuple[str, Any, Any]
CHANGES: tuple[Option, ...] = (("revert", Reverts, None), ("remedy", Remedies, None), ("patch", PatchFiles, None))
JUDGING: tuple[Option, ...] = (("without", RulesOff, None), ("view", Views, DEFAULT_RUN.view))
Strict = Annotated[
    bool,
    typer.Option(
        "--strict", rich_help_panel=JUDGE, help="Exit with 125 if a changed statement of the tree or a patch did not run."
    ),
]
STRICT: tuple[Option, ...] = (("strict", Strict, False),)
REPEAT: tuple[Option, ...] = (("repeat", Repeat, 1),)
SOURCE: tuple[Option, ...] = (("sglang", Sglang, ""),)
KERNELS: tuple[Option, ...] = (("kernels", KernelRuntime, "fast"),)
HOW: tuple[Option, ...] = (
    *KERNELS,
    ("device", Device, "cpu"),
    ("graphs", Graphs, DEFAULT_GRAPHS),
    ("prefill_graphs", PrefillGraphs, None),
    ("overlap", Overlap, None),
    ("tp", Ranks, 1),
    ("pp", Stages, 1),
    ("dtype", DataType, "float32"),
    ("attention", AttentionBackend, "triton"),
)
LIMITS: tuple[Option, ...] = (
    ("step_timeout", StepSeconds, DEFAULT_LIMITS.step),
    ("case_timeout", CaseSeconds, DEFAULT_LIMITS.case),
)

Command = Callable[..., object]


def run_options(*groups: tuple[Option, ...]) -> Callable[[Command], Command]:
    """Give a command these options in place of its parameter `spec`."""
    options = {name: (annotation, default) for group in groups for name, annotation, default in group}

    def decorate(command: Command) -> Command:
        own = [one for name, one in inspect.signature(command).parameters.items() if name != "spec"]
        keyword = inspect.Parameter.KEYWORD_ONLY
        more = [inspect.Parameter(name, keyword, default=usual, annotation=kind) for name, (kind, usual) in options.items()]

        @wraps(command)
        def wrapper(*args: Any, **kwargs: Any) -> object:
            given = {name: kwargs.pop(name, usual) for name, (_, usual) in options.items()}
            return command(*args, **kwargs, spec=spec_of(given))

        parameters = [one.replace(kind=keyword) for one in own] + more
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {one.name: one.annotation for one in parameters}
        return wrapper

    return decorate


def spec_of(given: dict[str, Any]) -> RunSpec:
    """The run that these options name; what is not given is at its default. Raises InputError before anything is imported."""
    changes = {name: given.get(name) or [] for name in ("revert", "remedy", "patch")}
    sglang, files = given.get("sglang", ""), [Path(file) for file in changes["patch"]]
    if files:
        from eagletwin.harness.engines.source import is_diff  # each command would pay for it as it starts

        if diffs := [file for file in files if is_diff(file)]:
            sglang = str(_with_diff(given, diffs))
            changes["patch"] = [str(file) for file in files if file not in diffs]
    engine = {name: given[name] for name in ("tp", "pp", "dtype", "attention", "prefill_graphs") if name in given}
    mode = mode_of(given.get("device", "cpu"), given.get("graphs", DEFAULT_GRAPHS), given.get("overlap"), **engine)
    check_kernels(given.get("kernels", "fast"), mode)
    return RunSpec(
        sglang=sglang,
        mode=mode,
        kernels=given.get("kernels", "fast"),
        patches=patches_of(changes["revert"], changes["remedy"], [Path(file) for file in changes["patch"]]),
        changes=tuple(word for name, values in changes.items() for value in values for word in (f"--{name}", str(value))),
        without=rules_off(given.get("without")),
        view=given.get("view", DEFAULT_RUN.view),
        limits=Limits(step=given.get("step_timeout", DEFAULT_LIMITS.step), case=given.get("case_timeout", DEFAULT_LIMITS.case)),
        repeat=given.get("repeat", 1),
        strict=given.get("strict", False),
    )


def _with_diff(given: dict[str, Any], diffs: list[Path]) -> Path:
    """The tree that the release becomes with a unified diff. Raises InputError."""
    if "sglang" not in given or len(diffs) > 1:
        several = "a command of several releases" if len(diffs) == 1 else "several diffs"
        raise InputError(
            f"{diffs[0]} is a diff, in {several}",
            consequence="nothing was run",
            remedy="apply it to a source tree and name that by --sglang, or use edits: docs/reference/patch.md",
        )
    from eagletwin.harness.engines.source import patched_tree, resolve

    return patched_tree(resolve(given["sglang"]), diffs[0])


# The options of a search.

MINUTES, SHRINK_MINUTES, MAX_CASES = 5.0, 3.0, 1_000_000

_SEARCH, _WHERE, _CASES = "Search", "Where it runs", "Cases"

Minutes = Annotated[
    float,
    typer.Option(
        metavar="MINUTES",
        min=0.01,
        rich_help_panel=_SEARCH,
        help="Time limit of the search, with the import of SGLang. Shrinking has its own limit, --shrink-minutes. A case that "
        "is running when time is up runs to its end.",
    ),
]
MaxCases = Annotated[
    int,
    typer.Option(
        "--cases",
        metavar="N",
        min=1,
        rich_help_panel=_SEARCH,
        help="Limits the generated cases; shrinking runs do not count. Four cases mostly share one configuration.",
    ),
]
Seed = Annotated[int, typer.Option(metavar="N", min=0, rich_help_panel=_SEARCH, help="The same seed draws the same cases.")]
Findings = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=0,
        rich_help_panel=_SEARCH,
        help="End after this many different findings; 0: when the time is up. Findings differ by rule, stage, layer or kernel; "
        "crashes by exception and function.",
    ),
]
ShrinkMinutes = Annotated[
    float,
    typer.Option(
        metavar="MINUTES",
        min=0.0,
        rich_help_panel=_SEARCH,
        help="Time limit of shrinking each finding, independent of --minutes. The smallest case by then is reported, after "
        "three confirming runs.",
    ),
]
Processes = Annotated[
    int,
    typer.Option(
        "--workers",
        "-n",
        metavar="N",
        min=0,
        rich_help_panel=_WHERE,
        help="Processes that run cases, or workers of the cluster with --address. Default: one per core, as memory "
        "allows. A seed gives the same cases and the same result for any number, unless a change directs the search.",
        show_default=False,
    ),
]
Address = Annotated[
    str,
    typer.Option(
        metavar="ADDRESS",
        rich_help_panel=_WHERE,
        help="Run cases on a Ray cluster as well: HOST:PORT, or `auto` for the cluster of this machine.",
        show_default=False,
    ),
]
Resume = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        rich_help_panel=_WHERE,
        help="Continue the search of this run folder, with its options. --minutes, --cases, --findings and --shrink-minutes "
        "set new limits for the whole search.",
    ),
]
Shrink = Annotated[
    Path | None,
    typer.Option(
        metavar="CASE",
        rich_help_panel=_SEARCH,
        help="Do not search: shrink this case file further, whose time was up. --shrink-minutes limits it.",
    ),
]
Explain = Annotated[
    bool,
    typer.Option(
        "--explain",
        rich_help_panel=_SEARCH,
        help="If nothing is found, report the smallest case in which the change alters a recorded value, with both values. "
        "--shrink-minutes limits it.",
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FEATURE",
        rich_help_panel=_CASES,
        help="Draw only cases with this feature, or with one of a comma-separated list: a topic such as trees, sampling or "
        "grammar, a value such as topk=4, context-length=16 or updates=disk, a model recipe or a family. Repeatable: cases "
        "then have all of them. docs/guide/fuzz.md lists the features.",
    ),
]
Not = Annotated[
    list[str] | None,
    typer.Option("--not", metavar="FEATURE", rich_help_panel=_CASES, help="No cases with this feature. Repeatable."),
]
