"""Try many cases quickly: reused forks, each verdict remembered, and nothing kept but what is asked for.

What fuzz and the pytest plugin search with. A trial is a first look: whatever it finds is confirmed by check.confirm.
"""

import tempfile
from collections.abc import Callable, Collection
from copy import copy
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from eagletwin.harness.core.case import Case, encode_case
from eagletwin.harness.core.differs import Differs, runs_no_change
from eagletwin.harness.core.patch import Patch
from eagletwin.harness.core.records import Header
from eagletwin.harness.core.run_spec import DEFAULT_RUN, RunSpec
from eagletwin.harness.core.signature import Signature, signature_of
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.core.verdict import Verdict
from eagletwin.harness.engines.host import EngineProcess, Host
from eagletwin.harness.judge.judge import judge

# The verdict of one run, by its RunSpec.


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


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of one run of a case.

    before  the cases that had run in the same process
    until   the scheduler iteration after which it was to stop; -1: it ran to its end
    differs  in what the SGLang differs from its base, and which of that ran; changes: the same with what patches change
    """

    case: Case
    verdict: Verdict
    header: Header
    before: tuple[Case, ...]
    until: int = -1
    differs: Differs | None = None
    changes: tuple[Differs, ...] = ()

    @property
    def numbers(self) -> str:
        """A digest of all that was recorded."""
        return self.header.numbers

    @property
    def unrun(self) -> bool:
        """Whether it is unknown only because it runs no function that its tree changes: it did all that it claims to."""
        return set(self.case.exercises) <= set(self.verdict.exercised) and runs_no_change(self.verdict, self.differs)

    @property
    def clean(self) -> bool:
        """Whether all that was compared is right: that the case calls nothing of what a patch edits, or its tree changes, is no
        doubt about that."""
        return self.verdict.status == "equal" or self.verdict.vacuous

    @property
    def signature(self) -> Signature | None:
        """What was found, the same for two cases that show the same thing; None: nothing."""
        return signature_of(self.verdict, self.header.ending)


class Trials:
    """Runs and judges cases on the engines of a host, all by one RunSpec. foresee: with which patches a case may be tried
    later, on engines that are then forked from these."""

    def __init__(
        self, host: Host, run: RunSpec = DEFAULT_RUN, foresee: Callable[[Case], Collection[Patch]] = lambda case: ()
    ) -> None:
        self.host = host
        self.run = run
        self._foresee = foresee
        self.ran = 0  # cases that an engine ran
        self._known: dict[bytes, Trial] = {}

    def known(self, case: Case, until: int = -1) -> Trial | None:
        """An earlier trial of this case under any name, if it ran as far as `until`."""
        trial = self._known.get(_canonical(case))
        seen = trial is not None and (trial.signature is not None or trial.until == -1 or 0 <= until <= trial.until)
        return trial if seen else None

    def forget(self, case: Case) -> None:
        """What was seen of this case does not stand."""
        self._known.pop(_canonical(case), None)

    def look(self, case: Case, until: int = -1, *, anew: bool = False) -> Trial:
        """Run and judge a case, unless that is known already and not wanted `anew`. until: no further than this iteration."""
        trial = None if anew else self.known(case, until)
        if trial is None:
            trial = self._run(case, until)
            self._known[_canonical(case)] = trial
        return trial

    def stand(self, case: Case) -> EngineProcess:
        """The engine of a case's configuration, built if it does not stand. Raises WouldNotStart."""
        return self.host.engine(case, self.run.applied, self.run.kernels, self._foresee(case))

    def look_alone(self, case: Case) -> Trial:
        """Run and judge a case in a process of its own."""
        return self._run(case, fresh=True)

    def _run(self, case: Case, until: int = -1, *, fresh: bool = False) -> Trial:
        self.ran += 1
        engine = self.stand(case)
        with tempfile.TemporaryDirectory(prefix="eagletwin-") as scratch:
            trace = engine.run(case, Path(scratch), self.run.limits, fresh=fresh, until=until)
        verdict = self._verdict_before(case, trace) or judge_run(trace, self.run)
        return Trial(case, verdict, trace.header, engine.before, until, trace.differs, trace.changes)

    def _verdict_before(self, case: Case, trace: Trace) -> Verdict | None:
        """What was said of the same trace: a case that is run again, alone, mostly leaves the same, and where experts tie the
        judge takes as long as the run. None: this trace is another, or one of several ranks."""
        trial = self._known.get(_canonical(case))
        alone = trace.header.engine.tp * trace.header.engine.pp == 1
        if trial is None or not alone or _apart_from_when(trial.header) != _apart_from_when(trace.header):
            return None
        return trial.verdict


def _apart_from_when(header: Header) -> Header:
    """A header, of whose tensors it has the digest, without how many cases had run before."""
    return replace(header, before=0, sha256="")


def _canonical(case: Case) -> bytes:
    return encode_case(replace(case, name="case"))
