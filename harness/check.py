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
    """What a check came to. `folder` holds case.json, the trace, engine.log, verdict.json and report.txt."""

    case: Case
    verdict: Verdict
    trace: Trace
    folder: Path


def check(
    engine: EngineProcess, case: Case, folder: Path, limits: Limits, *, without: frozenset[str] = frozenset(), again: str = ""
) -> Outcome:
    """Run and judge `case` in `folder` (empty); replay a divergence in sub-folders. `again`: the command that repeats it."""
    (folder / "case.json").write_text(pretty_case(case))
    trace = engine.run(case, folder, limits)
    verdict = judge(trace, without)
    for replay in range(1, REPLAYS + 1):
        if verdict.status != "diverged" or not engine.alive:
            break
        sub = folder / f"replay-{replay}"
        sub.mkdir()
        second = judge(engine.run(case, sub, limits), without)
        if second.first is None or verdict.first is None or second.first.signature != verdict.first.signature:
            other = second.first.rule if second.first else second.reason or second.status
            verdict = msgspec.structs.replace(
                verdict,
                status="unknown",
                reason=f"nondeterministic: first {verdict.rule}, in replay {replay} {other}; both traces are kept",
            )
    (folder / "verdict.json").write_bytes(msgspec.json.format(msgspec.json.encode(verdict)))
    (folder / "report.txt").write_text(argue(trace.header, verdict, again=again) + "\n")
    return Outcome(case, verdict, trace, folder)
