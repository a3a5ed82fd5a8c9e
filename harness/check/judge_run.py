"""The verdict of one run, by its RunSpec."""

from copy import copy

from msgspec.structs import replace

from eagletwin.harness.core.differs import runs_no_change
from eagletwin.harness.core.run_spec import RunSpec
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.core.verdict import Verdict
from eagletwin.harness.judge.judge import judge


def judge_run(trace: Trace, run: RunSpec) -> Verdict:
    """The verdict. A workaround that nothing calls leaves SGLang as it is: that is no doubt about what ran. Nor is it one of a
    reproduction that nothing of a tree's changes ran: the finding is gone, and the report says what did not run."""
    verdict = judge(_without_idle(trace, idle_workarounds(trace, run)), run.without, run.view)
    if run.finding and runs_no_change(verdict, trace.differs):
        return replace(verdict, status="equal", reason="", vacuous=False)
    return verdict


def idle_workarounds(trace: Trace, run: RunSpec) -> frozenset[str]:
    """The functions that workarounds alone edit, and that nothing called."""
    tested = {target for patch in run.patches for target in patch.targets}
    spared = {target for patch in run.workarounds for target in patch.targets} - tested
    return frozenset(spared.intersection(trace.header.idle_edits))


def _without_idle(trace: Trace, idle: frozenset[str]) -> Trace:
    if not idle:
        return trace
    called = copy(trace)
    called.header = replace(trace.header, idle_edits=tuple(name for name in trace.header.idle_edits if name not in idle))
    return called
