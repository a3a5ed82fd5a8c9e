"""`eagletwin fuzz`: generate cases until one diverges, and shrink it."""

import shlex
from typing import Annotated, Literal

import typer

from .cli_options import (
    CASE_SECONDS,
    DEFAULT_GRAPHS,
    DEFAULT_RUNS,
    STEP_SECONDS,
    AttentionBackend,
    CaseSeconds,
    DataType,
    Device,
    Graphs,
    KernelRuntime,
    Overlap,
    PatchFiles,
    Ranks,
    Remedies,
    Reverts,
    RulesOff,
    Runs,
    Sglang,
    StepSeconds,
    Views,
    change_words,
    held_fields,
    mode_of,
    patches_of,
    rules_off,
    tell,
    unusual_words,
)
from .errors import EXIT_DIVERGED, EXIT_EQUAL, EXIT_INTERRUPTED, EXIT_UNKNOWN, Told


def fuzz(
    minutes: Annotated[
        float,
        typer.Option(
            min=0.01,
            help="When to stop generating cases, counted from the start: importing SGLang and building engines are part of it, "
            "and shrinking, where --findings asks for more than one. A case that runs by then is finished.",
        ),
    ] = 5.0,
    max_cases: Annotated[
        int,
        typer.Option(
            "--cases",
            min=1,
            help="Generate no more than this many; what shrinking runs is not counted. 20 at a time share most of one "
            "configuration.",
        ),
    ] = 1_000_000,
    seed: Annotated[int, typer.Option(min=0, help="The same seed draws the same cases.")] = 0,
    findings: Annotated[int, typer.Option(min=1, help="Go on until this many different rules were found broken.")] = 1,
    shrink_minutes: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="How long to shrink each finding, whatever --minutes says. The smallest case until then counts; it is run "
            "three times more, to make sure.",
        ),
    ] = 3.0,
    model: Annotated[str | None, typer.Option(help="Only this model recipe.")] = None,
    topk: Annotated[int | None, typer.Option(help="Only this topk: 1, 2, 3, 4, 8 or 16.")] = None,
    context_length: Annotated[
        int | None, typer.Option(help="Only this context, up to its end, where live bugs show: 8, 16, 32 or 64.")
    ] = None,
    small_trees: Annotated[
        bool, typer.Option("--small-trees", help="Trees with fewer nodes than their longest path, a live bug.")
    ] = False,
    update_weights: Annotated[
        str | None,
        typer.Option(metavar="disk|tensor", help="Workers that start with other weights, and are given the model's."),
    ] = None,
    sampling: Annotated[
        Literal["none", "target", "rejection", "any"],
        typer.Option(help="Requests that sample: by the target alone, by rejection (chains), either."),
    ] = "none",
    revert: Reverts = None,
    remedy: Remedies = None,
    patch: PatchFiles = None,
    without: RulesOff = None,
    view: Views = "slot_layout",
    sglang: Sglang = "",
    kernels: KernelRuntime = "fast",
    device: Device = "cpu",
    graphs: Graphs = DEFAULT_GRAPHS,
    overlap: Overlap = None,
    tp: Ranks = 1,
    dtype: DataType = "float32",
    attention: AttentionBackend = "triton",
    out: Runs = DEFAULT_RUNS,
    step_timeout: StepSeconds = STEP_SECONDS,
    case_timeout: CaseSeconds = CASE_SECONDS,
) -> int:
    """Generate cases until one diverges, then shrink it."""
    from itertools import islice

    # what was typed is looked at before anything slow is imported
    mode = mode_of(device, graphs, overlap, tp, dtype, attention)
    patches, off = patches_of(revert, remedy, patch), rules_off(without)
    from eagletwin.cases.sampling import searched
    from eagletwin.cases.strategies import SMALL_TREE, cases

    from .engines.source import resolve

    held = held_fields(
        model=model,
        topk=topk,
        tree_size=SMALL_TREE if small_trees else None,
        context_length=context_length,
        update_weights=update_weights,
    )
    words = ["eagletwin", "fuzz", "--seed", str(seed), *change_words(revert, remedy, patch, without)]
    asked = {name.replace("_", "-"): value for name, value in held.items() if name != "tree_size"}
    words += [word for name, value in asked.items() for word in (f"--{name}", str(value))]
    words += ["--small-trees"] * small_trees
    words += unusual_words(("--sampling", sampling, "none"), ("--view", view, "slot_layout"))
    words += unusual_words(("--minutes", minutes, 5.0), ("--cases", max_cases, 1_000_000), ("--findings", findings, 1))
    words += unusual_words(("--shrink-minutes", shrink_minutes, 3.0), ("--kernels", kernels, "fast"), ("--sglang", sglang, ""))
    words += unusual_words(("--step-timeout", step_timeout, STEP_SECONDS), ("--case-timeout", case_timeout, CASE_SECONDS))
    words += mode.options
    source = resolve(sglang)
    tell(f"importing SGLang {source.called}; then cases, for up to {minutes:g} min in all")
    from .engines.process import Host, Limits, WouldNotStart
    from .fuzz import Fuzz
    from .paths import new_run_folder
    from .report.search import finding_text, tally_text, write_summary
    from .trial import Trials

    host = Host(source=source, mode=mode)
    folder = new_run_folder(out, f"fuzz-{seed}")
    limits = Limits(step=step_timeout, case=case_timeout)
    search = Fuzz(
        Trials(host, patches=patches, kernels=kernels, without=off, view=view, limits=limits),
        folder,
        seed=seed,
        seconds=60 * minutes,
        max_cases=max_cases,
        shrink_seconds=60 * shrink_minutes,
        command=shlex.join(words),
        held=held,
        draws=cases if sampling == "none" else searched(sampling, retract=not mode.overlap),
        progress=tell,
    )
    found, interrupted = [], False
    try:
        with host:
            for finding in islice(search.search(), findings):
                found.append(finding)
                print(finding_text(finding))
    except WouldNotStart as error:
        print(f"UNKNOWN\n\n  {error}")
        return EXIT_UNKNOWN
    except KeyboardInterrupt:
        interrupted = True
        raise Told(EXIT_INTERRUPTED) from None
    finally:
        write_summary(folder, search, found)
        print(tally_text(search, found, interrupted=interrupted))
    statuses = {finding.outcome.verdict.status for finding in found}
    if "diverged" in statuses:
        return EXIT_DIVERGED
    return EXIT_UNKNOWN if found or not search.tally.statuses["equal"] else EXIT_EQUAL
