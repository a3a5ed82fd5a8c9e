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
    verdict = judge(_without_workarounds(trace, run), run.without, run.view)
    if run.finding and runs_no_change(verdict, trace.differs):
        return replace(verdict, status="equal", reason="", vacuous=False)
    return verdict


def idle_workarounds(trace: Trace, run: RunSpec) -> frozenset[str]:
    """The functions that workarounds alone edit, and that nothing called."""
    tested = {target for patch in run.patches for target in patch.targets}
    spared = {target for patch in run.workarounds for target in patch.targets} - tested
    return frozenset(spared.intersection(trace.header.idle_edits))


def _without_workarounds(trace: Trace, run: RunSpec) -> Trace:
    """The trace, without what it says of workarounds."""
    names = {patch.name for patch in run.workarounds} - {patch.name for patch in run.patches}
    if not names:
        return trace
    rest, header, idle = copy(trace), trace.header, idle_workarounds(trace, run)
    patched = tuple(change for change in header.patched or () if change.patch not in names)
    edits = tuple(name for name in header.idle_edits if name not in idle)
    rest.header = replace(header, idle_edits=edits, patched=patched)
    return rest
