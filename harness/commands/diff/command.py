"""`eagletwin diff`: two traces number for number, or one case on two SGLangs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eagletwin.cases.ledger import case_of
from eagletwin.harness.core.differs import doubts_of
from eagletwin.harness.core.errors import EXIT_DIVERGED, EXIT_EQUAL, EXIT_UNKNOWN, InputError
from eagletwin.harness.core.mode import CPU
from eagletwin.harness.core.run_spec import RunSpec
from eagletwin.harness.core.terminal import show

from ..as_json import tell_result, with_json
from ..options import DEFAULT_RUNS, Runs, tell
from ..result import DifferenceFacts, DiffFacts
from ..run_options import HOW, LIMITS, run_options

if TYPE_CHECKING:
    from eagletwin.harness.core.trace import Trace

    from .comparison import Comparison
    from .pair import Half


@with_json
@run_options(HOW, LIMITS)
def diff(
    left: Annotated[str, typer.Argument(help="A trace folder; or a case, to be run on two SGLangs.")],
    right: Annotated[str, typer.Argument(help="Another trace of the same requests.")] = "",
    lines: Annotated[int, typer.Option(min=1, help="How many differences to print.")] = 20,
    sglang: Annotated[
        list[str] | None,
        typer.Option(
            "--sglang", metavar="RELEASE|PATH", help="Give it twice: the case runs on both, and their traces are compared."
        ),
    ] = None,
    out: Runs = DEFAULT_RUNS,
    *,
    spec: RunSpec,
) -> int:
    """Compare two traces number for number, or one case on two SGLangs.

    Exit codes: 0 the same within the judge's bound, 1 different, 125 one of the two did not finish, or nothing was compared.
    """
    if len(sglang or ()) != (0 if right else 2):
        raise InputError(
            "diff takes two trace folders, or one case and --sglang twice",
            consequence="nothing was compared",
            remedy="`eagletwin diff A B`, or `eagletwin diff CASE --sglang 0.5.11 --sglang 0.5.12`",
        )
    if sglang:
        halves = _run_both(left, sglang[0], sglang[1], out, spec)
        if halves is None:
            return EXIT_UNKNOWN
        traces, sides = [half.trace for half in halves], [half.line for half in halves]
    else:
        traces, sides = _recorded(left, right, spec), [left, right]
    from .comparison import comparison_text
    from .comparison import diff as compare

    result = compare(*traces)
    print(f"left:  {sides[0]}\nright: {sides[1]}")
    print(comparison_text(result, lines))
    changes = _changes(traces, lines)
    if changes:
        print(changes)
    differences = [DifferenceFacts(where=one.where, left=one.left, right=one.right) for one in result.differences]
    tell_result(DiffFacts(left=sides[0], right=sides[1], same=result.same, compared=result.compared, differences=differences))
    return _exit_code(result, traces)


def _run_both(name: str, left: str, right: str, out: Path, spec: RunSpec) -> "tuple[Half, Half] | None":
    """The case on two SGLangs; None: one would not start, which was said."""
    from eagletwin.harness.core.files import new_run_folder
    from eagletwin.harness.engines.source import resolve

    case = case_of(name)
    sources = resolve(left), resolve(right)
    folder = new_run_folder(out, f"{case.name}-diff")
    tell(f"{case.name} runs on SGLang {left} (left) and on {right} (right); both are imported first")
    tell(f"folder: {folder}")
    from .pair import OneWouldNotStart, run_pair

    try:
        return run_pair(case, sources, folder, spec)
    except OneWouldNotStart as error:
        print(f"UNKNOWN  {case.name} on SGLang {(left, right)[error.side]}\n\n  {error}\n\n  folder: {folder}")
        return None


def _recorded(left: str, right: str, spec: RunSpec) -> "list[Trace]":
    """Two traces from disk. Raises InputError."""
    from eagletwin.harness.families.traces import strangers_trace

    if spec.mode != CPU or spec.kernels != "fast":
        raise InputError(
            "options of an engine, with two traces that were recorded before",
            consequence="nothing was compared",
            remedy="leave them out; or name one case, and --sglang twice",
        )
    return [strangers_trace(Path(left)), strangers_trace(Path(right))]


def _exit_code(result: "Comparison", traces: "list[Trace]") -> int:
    """What the comparison says, where it says anything; else why it does not, printed."""
    if any(one.header.ending.kind != "finished" for trace in traces for one in trace.processes):
        print("One of the two runs did not finish: what is the same until then says nothing about the rest.")
        return EXIT_UNKNOWN
    if result.same and not result.compared:
        print("Nothing was compared: neither trace holds a number.")
        return EXIT_UNKNOWN
    doubts = _doubts(traces)
    if result.same and doubts:
        show("\n".join(f"That says nothing about a change: {doubt}." for doubt in doubts))
        return EXIT_UNKNOWN
    return EXIT_EQUAL if result.same else EXIT_DIVERGED


def _doubts(traces: "list[Trace]") -> list[str]:
    """Why two traces that are the same say nothing about what differs between the two SGLangs; [] if they do."""
    if traces[0].header.engine.version == traces[1].header.engine.version:
        return []
    return doubts_of([trace.differs for trace in traces if trace.differs is not None], mutual=_mutual(traces))


def _mutual(traces: "list[Trace]") -> bool:
    """Whether each trace says in what its SGLang differs from the other's."""
    bases = [trace.differs.base if trace.differs is not None else "" for trace in traces]
    return bases == [trace.header.engine.version for trace in reversed(traces)]


def _changes(traces: "list[Trace]", lines: int) -> str:
    """The functions in which the two SGLangs differ, run and not run, `lines` of each; "" if they were not compared."""
    if not _mutual(traces):
        return ""
    text = ["The two SGLangs differ, file by file:"]
    for side, trace in zip(("left:  ", "right: "), traces, strict=True):
        assert trace.differs is not None
        listed = trace.differs.listed(shown=lines, gone="Only in the other") or [
            "Nothing but comments, documentation, and what the other has alone."
        ]
        text += [f"  {side if number == 0 else '       '}{line}" for number, line in enumerate(listed)]
    return "\n".join(text)
