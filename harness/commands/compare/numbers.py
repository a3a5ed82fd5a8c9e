"""`compare RUN RUN` and `compare BASE HEAD --case CASE`: two traces of one case, number for number."""

from pathlib import Path

from msgspec.structs import replace as replace_fields

from eagletwin.harness.check.confirm import Outcome, brief
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.differs import Watch, doubts_of
from eagletwin.harness.core.errors import EXIT_DIVERGED, EXIT_EQUAL, EXIT_UNKNOWN
from eagletwin.harness.core.run_spec import TITLES, RunSpec
from eagletwin.harness.core.terminal import show
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.engines.source import Source, TooMany, between
from eagletwin.harness.judge.trace_diff import Comparison, diff

from ..matrix import Matrix, Question, hosts_of
from ..options import log_progress
from ..result import DifferenceFacts, DiffFacts, emit_result


def comparison_text(result: Comparison, lines: int) -> str:
    """The first `lines` differences, left | right, those beyond the bound first, and the sum."""
    shown = sorted(result.differences, key=lambda difference: difference.bits)[:lines]
    text = [f"{one.where}: {one.left} | {one.right}" + ("  (within the bound)" if one.bits else "") for one in shown]
    hidden = len(result.differences) - lines
    text += [f"… and {hidden} more"] if hidden > 0 else []
    exact = "identical" if not result.differences else f"largest relative float difference {result.largest:.3g}"
    exact = exact if result.compared else "no number"
    word = "UNKNOWN" if not result.compared and result.same else "SAME" if result.same else "DIFFERENT"
    return "\n".join([*text, f"{word}: {result.compared} compared, {len(result.differences)} differ; {exact}"])


def compare_runs(left: str, right: str, lines: int) -> int:
    """Compare two run folders number for number. Raises InputError."""
    from eagletwin.harness.families.valid import strangers_trace

    return _report([strangers_trace(Path(left)), strangers_trace(Path(right))], (left, right), lines)


def compare_case(
    case: Case, names: tuple[str, str], sources: tuple[Source, Source], lines: int, folder: Path, run: RunSpec
) -> int:
    """Run a case on two releases or trees, such as a pull request and its base, and compare what they recorded.

    Each engine watches the functions in which its code differs from the other's, by content: a branch whose changes are
    committed is looked at like one that is dirty.
    """
    matrix, outcomes = Matrix(), list[Outcome]()
    with hosts_of(sources, run.mode, watches(sources) or (None, None)) as hosts:
        for side, host, name in zip(("left", "right"), hosts, names, strict=True):
            question = Question(what=case, name=side, out=folder, run=replace_fields(run, release=name))
            answer = matrix.ask(host, question)
            if (outcome := answer.run) is None:
                print(f"UNKNOWN  {case.name} on {run.mode.title} {name}\n\n  {answer.error}\n\n  folder: {folder}")
                return EXIT_UNKNOWN
            outcomes.append(outcome)
    left, right = (_line(outcome) for outcome in outcomes)
    return _report([outcome.trace for outcome in outcomes], (left, right), lines)


def _line(outcome: Outcome) -> str:
    """How the run ended, on one line."""
    verdict = outcome.verdict
    word = "" if verdict.status == "equal" else f" {brief(verdict)}"
    engine = outcome.trace.header.engine
    return f"{TITLES[engine.name]} {engine.version}: {verdict.status}{word} ({outcome.folder})"


def watches(sources: tuple[Source, Source]) -> tuple[Watch | None, Watch | None] | None:
    """What each engine looks for: in what it differs from the other; two None: in what it differs from what it was made from,
    since both are releases, or differ in too much. None alone: no file differs."""
    if all(source.difference is None and not source.tree for source in sources):
        return None, None  # two releases
    try:
        return between(*sources)
    except TooMany as error:
        log_progress(f"{error}, more than are listed: which of their functions run is looked at in each tree by itself")
        return None, None


def _report(traces: list[Trace], sides: tuple[str, str], lines: int) -> int:
    result = diff(*traces)
    print(f"left:  {sides[0]}\nright: {sides[1]}")
    print(comparison_text(result, lines))
    changes = _changes(traces, lines)
    if changes:
        print(changes)
    differences = [DifferenceFacts(where=one.where, left=one.left, right=one.right) for one in result.differences]
    emit_result(DiffFacts(left=sides[0], right=sides[1], same=result.same, compared=result.compared, differences=differences))
    return _exit_code(result, traces)


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
    """Why two traces that are the same say nothing about what differs between the two; [] if they do."""
    if traces[0].header.engine.version == traces[1].header.engine.version:
        return []
    return doubts_of([trace.differs for trace in traces if trace.differs is not None], mutual=_mutual(traces))


def _mutual(traces: "list[Trace]") -> bool:
    """Whether each trace says in what its code differs from the other's."""
    bases = [trace.differs.base if trace.differs is not None else "" for trace in traces]
    return bases == [trace.header.engine.version for trace in reversed(traces)]


def _changes(traces: "list[Trace]", lines: int) -> str:
    """The functions in which the two differ, run and not run, `lines` of each; "" if they were not compared."""
    if not _mutual(traces):
        return ""
    text = ["The two differ, file by file:"]
    for side, trace in zip(("left:  ", "right: "), traces, strict=True):
        assert trace.differs is not None
        listed = trace.differs.list_functions(shown=lines, gone="Only in the other") or [
            "Nothing but comments, documentation, and what the other has alone."
        ]
        text += [f"  {side if number == 0 else '       '}{line}" for number, line in enumerate(listed)]
    return "\n".join(text)
