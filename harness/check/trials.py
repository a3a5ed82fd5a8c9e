"""Try many cases quickly, on an engine and on the base of its change: reused forks, each verdict remembered, no files left.

What fuzz and the pytest plugin search with. A trial is a first look: whatever it finds is confirmed by check.confirm.
"""

import atexit
import tempfile
from collections.abc import Callable, Collection, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from msgspec.structs import replace

from eagletwin.cases.entry import Probe
from eagletwin.cases.ledger import ENTRIES
from eagletwin.harness.core.case import Case, encode_case
from eagletwin.harness.core.differs import Differs, runs_no_change
from eagletwin.harness.core.errors import EagletwinError, InputError
from eagletwin.harness.core.files import installed_version
from eagletwin.harness.core.patch import Patch
from eagletwin.harness.core.records import Header
from eagletwin.harness.core.run_spec import CPU, DEFAULT_RUN, ENGINES, TITLES, Mode, RunSpec
from eagletwin.harness.core.signature import Signature, signature_of
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.core.verdict import Divergence, Verdict, View
from eagletwin.harness.engines import protocol
from eagletwin.harness.engines.host import EngineProcess, Host
from eagletwin.harness.engines.provision import releases
from eagletwin.harness.engines.source import Source, at_hand, resolve
from eagletwin.harness.judge.judge import judge

# The verdict of one run, by its RunSpec.


def judge_run(trace: Trace, run: RunSpec) -> Verdict:
    """The verdict. A workaround that nothing calls changes nothing: that is no doubt about what ran. Nor is it one of a
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
    differs  in what the tree differs from its base, and which of that ran; changes: the same with what patches change
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
        alone = trace.header.engine.processes == 1
        if trial is None or not alone or _apart_from_when(trial.header) != _apart_from_when(trace.header):
            return None
        return trial.verdict


def _apart_from_when(header: Header) -> Header:
    """A header, of whose tensors it has the digest, without how many cases had run before."""
    return replace(header, before=0, sha256="")


def _canonical(case: Case) -> bytes:
    return encode_case(replace(case, name="case"))


# The release or tree beside which a change is looked at: what a case shows there as well is not the change's.
#
# A remedy may mend more than its own bug: one that widens a buffer also hides that a change made the buffer too small. So what
# is wrong with a change and equal with a remedy is a known bug's only if it is wrong without the change, too.


class Base:
    """`run` on the engine without the change: a release, as `host` has it. called: what messages call it."""

    def __init__(self, host: Host, run: RunSpec) -> None:
        self.host, self.run = host, run
        self.called = f"{host.mode.title} {host.source.called}"
        self.refused = ""  # why it could not be asked, the last time

    def right(self, case: Case, remedies: Collection[Patch], view: View) -> bool:
        """Whether all of a case is right there, with these remedies. False where it cannot be asked: `refused` says why."""
        try:
            trial = self.trials(remedies, view).look_alone(replace(case, exercises=()))
        except EagletwinError as error:
            self.refused = " ".join(error.cause.split())
            return False
        self.refused = ""
        return trial.clean

    def look(self, case: Case, remedies: Collection[Patch], view: View) -> Trial | None:
        """A case there, alone; None where it cannot be asked."""
        try:
            return self.trials(remedies, view).look_alone(case)
        except EagletwinError:
            return None

    def shows(self, trial: Trial, remedies: Collection[Patch], view: View) -> bool:
        """Whether the case of a trial, which ran alone, comes to the same there, number for number."""
        there = self.look(trial.case, remedies, view)
        return there is not None and (there.signature, there.numbers) == (trial.signature, trial.numbers)

    def trials(self, remedies: Collection[Patch], view: View) -> Trials:
        """Runs cases there, with these remedies."""
        patches = tuple(dict.fromkeys((*self.run.patches, *remedies)))
        return Trials(self.host, replace(self.run, patches=patches, view=view))


def base_of(host: Host, run: RunSpec) -> Base | None:
    """What a run is to be compared with: the base that its tree names; else of a tree its release, or the one that is
    installed; of an engine that patches change, the same without them, but for remedies of the ledger, which the search is to
    look past. None: nothing is changed in it, or no release is at hand."""
    remedies = tuple(patch for patch in run.patches if any(patch == entry.remedy for entry in ENTRIES.values()))
    if not (host.source.tree or host.source.base):
        return None if remedies == run.patches else Base(host, replace(run, patches=remedies, changes=()))
    try:
        release = host.source.base or _release_of(host.source)
    except EagletwinError:  # a release of the cache that is damaged, where there is no network
        release = None
    return (
        None
        if release is None
        else Base(host.beside(release), replace(run, release=release.name, patches=remedies, changes=()))
    )


def _release_of(tree: Source) -> Source | None:
    """The release that a tree was made from, or the installed one's; None if the tree is that, or it is not at hand."""
    version = tree.called.partition("+")[0]
    known = releases(tree.engine)
    newest = installed_version(tree.engine) if ENGINES[tree.engine].installed else known[-1]
    if tree.called == version and version in known:
        return None
    return at_hand(version if version in known else newest, tree.engine)


# Ask a release by one call: the ledger's probes (cases/entry.py), whose bugs no case reaches without a GPU.


def ask(probe: Probe, host: Host, patches: tuple[Patch, ...] = ()) -> Verdict:
    """Make the call, with these changes in memory, and compare its rows: the first that differs is the divergence."""
    call = probe.call
    answered = host.probe(protocol.Probe(call.name, dict(call.given), patches))
    for number, row in enumerate(call.expected):
        actual = answered[number] if number < len(answered) else []
        if actual != row:
            first = Divergence(
                rule=probe.rule,
                request="",
                round=0,
                stage="draft.decode",
                step=number + 1,
                iteration=0,
                index=f"{call.what} {number + 1}",
                expected=str(row),
                actual=str(actual),
            )
            return Verdict(status="diverged", rule=probe.rule, first=first)
    return Verdict(status="equal", checked={probe.rule: len(call.expected)})


def probe_text(probe: Probe, verdict: Verdict, release: str) -> str:
    """What came of it, as a report would have it."""
    lines = [f"{verdict.status.upper()}  {probe.id} on {TITLES[probe.engine]} {release} (cpu, one function called alone)"]
    if verdict.first is not None:
        lines += ["", f"  {verdict.rule}"]
        parts = (("index", verdict.first.index), ("expected", verdict.first.expected), ("actual", verdict.first.actual))
        lines += [f"  {name:9} {value}" for name, value in parts]
    return "\n".join(lines) + "\n"


# `eagletwin.check`: run a case on an engine's real worker and judge it, in one call.


def check(case: Case, *, patches: Sequence[Patch] = (), mode: Mode = CPU, **engine: str) -> Verdict:
    """Run a case and judge it. A second case of the same engine and mode starts in well under a second.

    engine   the name of an engine, and its release or the folder of a source tree: "" for the usual one, which is the
             installed one or the newest. Without one the installed engine
    patches  changes of it, in memory

    Raises EagletwinError where no engine starts, a patch does not apply, or the case is not valid.
    """
    which, named = next(iter(engine.items()), (mode.engine, ""))
    if len(engine) > 1 or which not in ENGINES:
        raise InputError(
            f"check takes one engine, and not {', '.join(engine)}",
            consequence="nothing was run",
            remedy=f"name a release or a tree by one of {', '.join(ENGINES)}",
        )
    mode = replace(mode, engine=which)
    return Trials(_host(named, mode), RunSpec(mode=mode, patches=tuple(patches))).look(case).verdict


@cache
def _host(named: str, mode: Mode) -> Host:
    """One process that has imported this release or tree. It ends with this one."""
    host = Host(source=resolve(named, mode.engine), mode=mode)
    atexit.register(host.close)
    return host
