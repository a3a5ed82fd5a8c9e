"""What is asked of traces: `eagletwin judge` of one that was recorded, `eagletwin diff` of two, or of a case on two SGLangs."""

import shlex
import sys
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
    unusual_words,
)
from .errors import EXIT_DIVERGED, EXIT_EQUAL, EXIT_UNKNOWN, InputError, exit_code_of


def judge(
    trace: Annotated[Path, typer.Argument(help="A folder with trace.json and trace.safetensors.")],
    without: RulesOff = None,
    view: Views = "slot_layout",
) -> int:
    """Judge a recorded trace again, without an engine."""
    from .judge import judge as judging
    from .report.argument import argue
    from .trace import read_trace

    off = rules_off(without)
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
    from .diff import comparison_text
    from .diff import diff as compare
    from .trace import read_trace

    if len(sglang or ()) != (0 if right else 2):
        raise InputError(
            "diff takes two trace folders, or one case and --sglang twice",
            consequence="nothing was compared",
            remedy="`eagletwin diff A B`, or `eagletwin diff CASE --sglang 0.5.11 --sglang 0.5.12`",
        )
    if sglang:
        from .engines.process import Limits
        from .engines.source import resolve
        from .pair import OneWouldNotStart, run_pair
        from .paths import new_run_folder

        mode, chosen = mode_of(device, graphs, overlap, tp, dtype, attention), case_of(left)
        sources = resolve(sglang[0]), resolve(sglang[1])
        folder = new_run_folder(out, f"{chosen.name}-diff")
        print(f"{chosen.name} runs on SGLang {sglang[0]} and on {sglang[1]}; folder: {folder}", file=sys.stderr, flush=True)
        limits = Limits(step=step_timeout, case=case_timeout)
        try:
            halves = run_pair(chosen, sources, folder, limits, kernels, mode)
        except OneWouldNotStart as error:
            print(f"UNKNOWN  {chosen.name} on SGLang {sglang[error.side]}\n\n  {error}\n\n  folder: {folder}")
            return EXIT_UNKNOWN
        print("\n".join(f"{side} {half.line}" for side, half in zip(("left: ", "right:"), halves, strict=True)))
        traces = [half.trace for half in halves]
    else:
        print(f"left:  {left}\nright: {right}")
        traces = [read_trace(Path(left)), read_trace(Path(right))]
    result = compare(*traces)
    print(comparison_text(result, lines))
    if sglang and any(trace.header.ending.kind != "finished" for trace in traces):
        print("One of the two did not come to its end: what is the same until then says nothing of the rest.")
        return EXIT_UNKNOWN
    return EXIT_EQUAL if result.same else EXIT_DIVERGED
