"""Run a case on an engine, judge it, and make sure of what was found. Used by the command line and by prove.

A divergence counts only if the same case diverges in the same way in two more fresh forks; one that does not is kept, and
is `unknown: nondeterministic`.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from .case import Case, pretty_case
from .engines.process import EngineProcess, Limits
from .judge import Verdict, judge
from .report.argument import argue
from .trace import Trace

REPLAYS = 2


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a check came to. `folder` holds case.json, the trace, engine.log, verdict.json and report.txt (`report`)."""

    case: Case
    verdict: Verdict
    trace: Trace
    folder: Path
    report: str


def check(
    engine: EngineProcess,
    case: Case,
    folder: Path,
    limits: Limits,
    *,
    without: frozenset[str] = frozenset(),
    repeat: int = 1,
    again: str = "",
) -> Outcome:
    """Run and judge `case` in `folder` (empty). A divergence is replayed in sub-folders, an equal run `repeat` - 1 times.

    `again` is the command that repeats it.
    """
    (folder / "case.json").write_text(pretty_case(case))
    trace = engine.run(case, folder, limits)
    verdict = judge(trace, without)
    replays = REPLAYS if verdict.status == "diverged" else repeat - 1 if verdict.status == "equal" else 0
    for replay in range(1, replays + 1):
        sub = folder / f"replay-{replay}"
        sub.mkdir()
        second = judge(engine.run(case, sub, limits), without)
        if _signature(second) != _signature(verdict):
            reason = f"nondeterministic: first {_brief(verdict)}; in replay-{replay} {_brief(second)}; both traces are kept"
            verdict = msgspec.structs.replace(verdict, status="unknown", reason=reason)
            break
    (folder / "verdict.json").write_bytes(msgspec.json.format(msgspec.json.encode(verdict)))
    report = argue(trace.header, verdict, again=again)
    (folder / "report.txt").write_text(report + "\n")
    return Outcome(case, verdict, trace, folder, report)


def _signature(verdict: Verdict) -> tuple[object, ...]:
    """What two runs must share to have come out alike."""
    return (verdict.status, verdict.first.signature) if verdict.first is not None else (verdict.status, verdict.rule)


def _brief(verdict: Verdict) -> str:
    first = verdict.first
    if first is None:
        return verdict.reason or verdict.status
    return f"{first.rule} at {first.stage}, round {first.round}, {first.index}: {first.actual} instead of {first.expected}"
