"""Run a case on an engine, judge it, and confirm what was found. Used by the command line, prove, fuzz and pytest.

A divergence counts only if the same case breaks the same rule in the same record in two more fresh forks. One that does not is
kept with the cases that ran before it in the same process, and is `unknown`: a state leak if that sequence diverges again,
twice, else nondeterministic.
"""

import shlex
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec

from eagletwin.harness.core.case import Case, pretty_case
from eagletwin.harness.core.run_spec import DEFAULT_RUN, Limits, RunSpec
from eagletwin.harness.core.terminal import count
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.core.verdict import Verdict, View
from eagletwin.harness.engines.difference import keep
from eagletwin.harness.engines.host import EngineProcess, Host, PatchDoesNotApply, WouldNotStart

from .argument import argue
from .known import KnownBugMatcher, entries_of, fewest, may_be
from .trials import Trial, base_of, judge_run

REPLAYS = 2


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a check. `folder` holds case.json, the trace, engine.log, verdict.json and report.txt (`report`), and for a
    changed source tree its patch.

    before  the cases that ran before it in the same process, if the verdict depends on them; saved in `folder`/before
    again   the command that repeats it
    known   the id of the ledger's bug that it may be; "" if none was found, or none looked for
    """

    case: Case
    verdict: Verdict
    trace: Trace
    folder: Path
    report: str
    before: tuple[Case, ...] = ()
    again: str = ""
    known: str = ""

    @property
    def of_page(self) -> tuple[Path, Trace, Verdict, str, str, str]:
        """What page.run.write_run takes."""
        return self.folder, self.trace, self.verdict, self.report, self.again, self.known

    def text(self, columns: int) -> str:
        """The report in lines of so many columns, as it is printed; the file has its own."""
        return argue(self.trace.header, self.verdict, again=self.again, trace=self.trace, columns=columns, known=self.known)


def check(
    engine: EngineProcess,
    case: Case,
    folder: Path,
    run: RunSpec = DEFAULT_RUN,
    *,
    after: Sequence[Case] = (),
    again: str = "",
    host: Host | None = None,
) -> Outcome:
    """Run and judge `case` in `folder`, which may hold case.json and repro.py, alone in its process or `after` others.

    run    how it is judged, how long it may take, how often it is run; the engine has the rest
    again  the command that repeats it
    host   builds the engines that ask whether a divergence is a known bug; None: that is not asked

    A divergence is replayed in sub-folders, an equal run `run.repeat` - 1 times.
    """
    (folder / "case.json").write_text(pretty_case(case), encoding="utf-8")
    keep(engine.source.difference, folder)
    trace = play(engine, after, case, folder, run.limits)
    verdict = judge_run(trace, run)
    if trace.header.before != len(after):
        reason = f"of {count(len(after), 'case')} before it only {trace.header.before} finished"
        verdict = msgspec.structs.replace(verdict, status="unknown", reason=reason)
    replays = REPLAYS if verdict.status == "diverged" else run.repeat - 1 if verdict.status == "equal" else 0
    for replay in range(1, replays + 1):
        sub = folder / f"replay-{replay}"
        sub.mkdir()
        second = judge_run(play(engine, after, case, sub, run.limits), run)
        verdict = agree(verdict, second, f"in replay-{replay}")
        if verdict.status == "unknown":
            break
    known = ""
    if host is not None and verdict.status == "diverged" and not after:
        known = may_be(host, case, verdict.rule, run, beside=True)
    if host is not None and verdict.status == "equal" and not after and trace.changes:
        verdict = msgspec.structs.replace(verdict, effect=_effect(host, case, run, trace))
    return conclude(case, verdict, trace, folder, tuple(after), again, known)


def _effect(host: Host, case: Case, run: RunSpec, trace: Trace) -> str:
    """What the change does to the numbers of an equal case; "" where the engine without it is not at hand."""
    base = base_of(host, run)
    trial = base.look(case, (), run.view) if base is not None else None
    if trial is None or not trial.numbers:
        return ""
    if trial.numbers == trace.header.numbers:
        return "No recorded number differs from a run without the change: in this case it is without effect."
    return "Recorded numbers differ from a run without the change, and all are right."


def confirm(
    engine: EngineProcess,
    case: Case,
    found: Verdict,
    before: Sequence[Case],
    folder: Path,
    run: RunSpec,
    again: str = "",
    host: Host | None = None,
) -> Outcome:
    """Run a case again that was found wrong after other cases: first alone, and if it is equal then, after those cases.

    A finding that does not show again is `unknown`, and kept.
    """
    alone = check(engine, case, folder, run, again=again, host=host)
    if alone.verdict.status != "equal" and not alone.verdict.vacuous:  # it needs no other case
        return alone
    if not before:
        verdict = nondeterministic(found, alone.verdict, "once more")
        return conclude(case, verdict, alone.trace, folder, (), again)
    for replay in (1, 2):
        sub = folder / f"sequence-{replay}"
        sub.mkdir()
        second = judge_run(play(engine, before, case, sub, run.limits), run)
        if not alike(second, found):
            verdict = nondeterministic(found, second, f"after the same {count(len(before), 'case')} again (sequence-{replay})")
            return conclude(case, verdict, alone.trace, folder, tuple(before), again)
    others = f"after {count(len(before), 'other case')} in one process"
    reason = f"state leak: {others} {brief(found)}, twice again, and alone it is equal"
    verdict = msgspec.structs.replace(found, status="unknown", reason=reason)
    return conclude(case, verdict, alone.trace, folder, tuple(before), again)


def play(engine: EngineProcess, before: Sequence[Case], case: Case, folder: Path, limits: Limits) -> Trace:
    """Run `case` after the cases `before` it in one fresh process; only its own trace is kept."""
    for number, earlier in enumerate(before):
        with tempfile.TemporaryDirectory(prefix="eagletwin-") as scratch:
            engine.run(earlier, Path(scratch), limits, fresh=number == 0)
    return engine.run(case, folder, limits, fresh=not before)


def conclude(
    case: Case, verdict: Verdict, trace: Trace, folder: Path, before: tuple[Case, ...], again: str, known: str = ""
) -> Outcome:
    """Write verdict and report, and the cases before it where they matter."""
    if before:
        earlier = folder / "before"
        earlier.mkdir(exist_ok=True)
        files = [earlier / f"{number:02}.json" for number in range(len(before))]
        for file, one in zip(files, before, strict=True):
            file.write_text(pretty_case(one), encoding="utf-8")
        words = [word for file in files for word in ("--after", str(file))]
        again = shlex.join([*shlex.split(again), *words])
    (folder / "verdict.json").write_bytes(msgspec.json.format(msgspec.json.encode(verdict)))
    report = argue(trace.header, verdict, again=again, trace=trace, known=known)
    (folder / "report.txt").write_text(report + "\n", encoding="utf-8")
    return Outcome(case, verdict, trace, folder, report, before, again, known)


def agree(first: Verdict, second: Verdict, where: str) -> Verdict:
    """The verdict of two runs of a case.

    A race, or a fault that reads memory which the case never wrote, breaks the same rule in the same record each time, with
    other numbers: that is a divergence, and its report says so.
    """
    if signature(first) == signature(second):
        return first
    if not alike(first, second):
        return nondeterministic(first, second, where)
    cause = "they depend on memory that this case did not write, or on a race"
    reason = f"the wrong numbers differ {where} ({brief(second)}): {cause}"
    return msgspec.structs.replace(first, reason=reason)


def alike(first: Verdict, second: Verdict) -> bool:
    """Whether two runs broke the same rule in the same record, or have the same verdict without a divergence."""
    if first.status == second.status == "diverged" and first.first is not None and second.first is not None:
        return first.first.place == second.first.place
    return signature(first) == signature(second)


def nondeterministic(first: Verdict, second: Verdict, where: str) -> Verdict:
    reason = f"nondeterministic: first {brief(first)}; {where} {brief(second)}; both are kept"
    return msgspec.structs.replace(first, status="unknown", reason=reason)


def signature(verdict: Verdict) -> tuple[object, ...]:
    """What two runs must share to have come out alike."""
    return (verdict.status, verdict.first.signature) if verdict.first is not None else (verdict.status, verdict.rule)


def brief(verdict: Verdict) -> str:
    first = verdict.first
    if first is None:
        return verdict.reason or verdict.status
    return f"{first.rule} at {first.stage}, round {first.round}, {first.index}: {first.actual} instead of {first.expected}"


# Which workarounds a finding needs: candidate fixes of known bugs without which its case shows something else.

Names = tuple[str, ...]


def minimize_workarounds(
    names: Names,
    found: Trial,
    look: Callable[[Names], Trial],
    *,
    fixed: Callable[[Names, Trial], bool] = lambda names, trial: True,
    enough: Names = (),
) -> Names:
    """The fewest of these workarounds with which a case first diverges in the same number, and by as much, as with all of them.

    found   the case with all of them; look: the case with some
    fixed   whether it would be right with these, which show that trial, if the finding were fixed
    enough  those that a larger case needed: tried before all
    """

    @cache
    def shows(some: Names) -> bool:
        try:
            trial = look(some)
        except (WouldNotStart, PatchDoesNotApply):
            return False
        alike = trial.signature == found.signature and signature(trial.verdict) == signature(found.verdict)
        return alike and fixed(some, trial)

    def clean(some: Sequence[str]) -> bool:
        return shows(tuple(some))

    if not names or clean(()):
        return ()
    return fewest(enough if enough and clean(enough) else names, clean)


def needed_in(
    matcher: KnownBugMatcher, alone: Trial, names: Names, view: View, *, last: bool = True, enough: Names = ()
) -> Names:
    """The same on the engine of `matcher`. alone: the case with all, in a process of its own.

    last  no smaller case is made: then the case is also to be right with them once the finding is fixed. The base says so, if
          it is right with all; else as many numbers are to diverge after the first as with all.
    """

    def right(some: Names) -> bool:
        return matcher.right_in_base(alone.case, entries_of(some), view)

    def is_fixed(some: Names, trial: Trial) -> bool:
        if not last or right(some):
            return True
        return not right(names) and trial.verdict.later == alone.verdict.later

    def look(some: Names) -> Trial:
        return matcher.trials(entries_of(some), view).look_alone(alone.case)

    return minimize_workarounds(names, alone, look, fixed=is_fixed, enough=enough)
