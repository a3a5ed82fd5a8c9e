"""What is asked of traces: `eagletwin judge` of one that was recorded, `eagletwin diff` of two, or of a case on two SGLangs."""

import shlex
from pathlib import Path
from typing import Annotated

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
    Ranks,
    RulesOff,
    Runs,
    StepSeconds,
    Views,
    case_of,
    mode_of,
    rules_off,
    tell,
    unusual_words,
)
from .errors import EXIT_DIVERGED, EXIT_EQUAL, EXIT_UNKNOWN, InputError, exit_code_of


def judge(
    trace: Annotated[Path, typer.Argument(help="A folder with trace.json and trace.safetensors.")],
    without: RulesOff = None,
    view: Views = "slot_layout",
) -> int:
    """Judge a recorded trace again, without an engine."""
    off = rules_off(without)
    from .judge import judge as judging
    from .report.argument import argue
    from .trace import read_trace

    recorded = read_trace(trace)
    verdict = judging(recorded, off, view)
    words = ["eagletwin", "judge", str(trace), *(word for rule in without or () for word in ("--without", rule))]
    words += unusual_words(("--view", view, "slot_layout"))
    print(argue(recorded.header, verdict, again=shlex.join(words), trace=recorded))
    return exit_code_of(verdict.status)


def diff(
    left: Annotated[str, typer.Argument(help="A trace folder; or a case, to be run on two SGLangs.")],
    right: Annotated[str, typer.Argument(help="Another trace of the same requests.")] = "",
    lines: Annotated[int, typer.Option(min=1, help="How many differences to print.")] = 20,
    sglang: Annotated[
        list[str] | None,
        typer.Option("--sglang", metavar="RELEASE|PATH", help="Twice: run the case on these two, and compare their traces."),
    ] = None,
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
    """Compare two traces number for number, or one case on two SGLangs. 0: same within the judge's bound, 1: different."""
    if len(sglang or ()) != (0 if right else 2):
        raise InputError(
            "diff takes two trace folders, or one case and --sglang twice",
            consequence="nothing was compared",
            remedy="`eagletwin diff A B`, or `eagletwin diff CASE --sglang 0.5.11 --sglang 0.5.12`",
        )
    if sglang:
        from .engines.source import resolve
        from .paths import new_run_folder

        mode, chosen = mode_of(device, graphs, overlap, tp, dtype, attention), case_of(left)
        sources = resolve(sglang[0]), resolve(sglang[1])
        folder = new_run_folder(out, f"{chosen.name}-diff")
        tell(f"{chosen.name} runs on SGLang {sglang[0]} (left) and on {sglang[1]} (right); both are imported first")
        tell(f"folder: {folder}")
        from .engines.process import Limits
        from .pair import OneWouldNotStart, run_pair

        limits = Limits(step=step_timeout, case=case_timeout)
        try:
            halves = run_pair(chosen, sources, folder, limits, kernels, mode)
        except OneWouldNotStart as error:
            print(f"UNKNOWN  {chosen.name} on SGLang {sglang[error.side]}\n\n  {error}\n\n  folder: {folder}")
            return EXIT_UNKNOWN
        traces = [half.trace for half in halves]
        sides = [half.line for half in halves]
    else:
        from .trace import read_trace

        traces = [read_trace(Path(left)), read_trace(Path(right))]
        sides = [left, right]
    from .diff import comparison_text
    from .diff import diff as compare

    result = compare(*traces)
    print(f"left:  {sides[0]}\nright: {sides[1]}")
    print(comparison_text(result, lines))
    if sglang and any(trace.header.ending.kind != "finished" for trace in traces):
        print("One of the two did not come to its end: what is the same until then says nothing of the rest.")
        return EXIT_UNKNOWN
    return EXIT_EQUAL if result.same else EXIT_DIVERGED
