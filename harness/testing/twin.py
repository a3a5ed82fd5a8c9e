"""What a test gets from the pytest plugin: check a case, or play one step by step, and fail with the argument.

A test that fails is concluded once, when it is over: what it failed on is confirmed in fresh forks and kept in a run folder.
"""

import os
import shlex
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from eagletwin.harness.check.argument import argue, error, headline
from eagletwin.harness.check.confirm import Outcome, confirm, needed_in
from eagletwin.harness.check.known import KnownBugMatcher, apart, entries_of
from eagletwin.harness.check.repro import SCRIPT, write_script
from eagletwin.harness.check.trials import Trial, Trials
from eagletwin.harness.core.case import Case, Event, Request
from eagletwin.harness.core.differs import Changes, add_changes
from eagletwin.harness.core.errors import EagletwinError, InputError
from eagletwin.harness.core.files import new_run_folder
from eagletwin.harness.core.patch import Patch
from eagletwin.harness.core.records import Header
from eagletwin.harness.core.run_spec import CPU, Kernels, Mode, RunSpec
from eagletwin.harness.core.signature import place_of
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.core.verdict import Verdict
from eagletwin.harness.engines.host import Host
from eagletwin.harness.engines.source import INSTALLED, Source
from eagletwin.harness.judge.judge import judge
from eagletwin.harness.judge.model import model_of
from eagletwin.harness.page.render import NAME
from eagletwin.harness.page.run import write_run


class CaseFailed(AssertionError):
    """A case that is not equal. The message is one line: rule and place, or why nothing can be said. `argument` is the rest."""

    def __init__(self, trial: Trial) -> None:
        super().__init__(headline(trial.header, trial.verdict))
        self.trial = trial

    @property
    def argument(self) -> str:
        return argue(self.trial.header, self.trial.verdict)


class TimeUp(EagletwinError):
    """A case was not run, because the test's time was up before it."""


class Twin:
    """Runs the cases of a test session on one host. A test may change the engine for itself (`begin`).

    ran      cases that an engine ran
    looked   cases of the test that runs that have a verdict, and reach what they are for
    refused  how many more it asked for that raised an error instead: no engine, or a patch that does not apply
    late     how many more the test asked for when its time was up: they were not run
    reached  how many cases exercised what
    changes  what the cases ran of that in which a source tree differs from its base
    unchecked  kernels that Triton's interpreter ran, where no rule kernel.* is checked
    """

    def __init__(
        self,
        out: Path,
        *,
        source: Source = INSTALLED,
        mode: Mode = CPU,
        kernels: Kernels = "fast",
        seconds: float = float("inf"),
    ) -> None:
        self.host = Host(source=source, mode=mode)
        self.reached: Counter[str] = Counter()
        self.changes = dict[str, Changes]()
        self.unchecked: set[str] = set()
        self._out = out
        self._usual = kernels
        self._seconds = seconds
        self._all: dict[tuple[tuple[Patch, ...], Kernels, frozenset[str]], Trials] = {}
        self._name = "case"
        self._live: list[LiveCase] = []
        self.begin("case")

    def __repr__(self) -> str:
        """As the fixture is called: Hypothesis prints it among the arguments of a test."""
        return "eagletwin"

    def begin(
        self,
        name: str,
        *,
        patches: tuple[Patch, ...] = (),
        kernels: Kernels | None = None,
        without: frozenset[str] = frozenset(),
        idle_changes: bool = False,
    ) -> None:
        """A test begins: its name, and what it changes. idle_changes: it may leave what a source tree changes alone."""
        key = (patches, kernels or self._usual, without)
        if key not in self._all:
            self._all[key] = Trials(self.host, RunSpec(mode=self.host.mode, patches=patches, kernels=key[1], without=without))
        self._trials = self._all[key]
        self._name = name
        self._deadline = time.monotonic() + self._seconds
        self.looked = self.late = self.refused = 0
        self._here, self._idle_changes = Changes(), idle_changes
        self.end()

    @property
    def ran(self) -> int:
        return sum(trials.ran for trials in self._all.values())

    def check(self, case: Case) -> Verdict:
        """Run and judge a case; raise CaseFailed unless it is equal.

        Where Hypothesis draws the cases, one that was run before is not run again, and one that does not reach what a patch
        edits is rejected. When the test's time is up, no case is run: Hypothesis rejects it, so that what was found before
        stands; elsewhere TimeUp is raised. Of a case that runs nothing of what a source tree changes the verdict is
        returned: the test fails in the end if none of its cases does (`unrun`).
        """
        __tracebackhide__ = True
        hypothesis = _hypothesis()
        trial = self._trials.known(case) if hypothesis is not None else None
        if trial is None:
            self._must_have_time()
            try:
                trial = self._trials.look(case, anew=True)
            except EagletwinError as error:
                self.refused += 1
                raise error.with_traceback(None) from None  # it says cause and remedy: pytest shows the test's own line alone
        self.unchecked.update(trial.header.fallbacks)
        self._note(trial.verdict)
        if self._add_changes(trial):
            self.looked += 1
            return trial.verdict
        if trial.verdict.vacuous and hypothesis is not None:
            hypothesis.reject()
        self.looked += 1
        if trial.verdict.status != "equal":
            raise CaseFailed(trial)
        return trial.verdict

    def _must_have_time(self) -> None:
        """Raise when the test's time is up; what Hypothesis runs rejects its case instead, and ends by itself."""
        __tracebackhide__ = True
        if time.monotonic() <= self._deadline:
            return
        self.late += 1
        hypothesis = _hypothesis()
        if hypothesis is not None:
            hypothesis.reject()
        raise TimeUp(
            f"--eagletwin-seconds {self._seconds:g} was up before this case",
            consequence="the case was not run, and nothing is known of it",
            remedy="give the test more seconds, or fewer cases",
        )

    @property
    def unrun(self) -> str:
        """Why the test that runs says nothing about its source tree, although none of its cases failed; "" if it does."""
        return "" if self._idle_changes else self._here.doubt

    def _add_changes(self, trial: Trial) -> bool:
        """Count what a case ran of a tree's changes; whether the only thing to say about it is that it ran none."""
        add_changes(self.changes, trial.changes)
        self._here.add(trial.differs)
        return trial.unrun

    @property
    def unfinished(self) -> list[str]:
        """Names of the cases that the test began to play and left without a judged end."""
        return [live.case.name for live in self._live if live.left]

    def start(self, case: Case) -> "LiveCase":
        """Begin to play a case step by step. The engine is its own until it is closed or the test is over."""
        __tracebackhide__ = True
        self._must_have_time()
        self.looked += 1
        try:
            live = LiveCase(self, case)
        except EagletwinError as error:
            raise error.with_traceback(None) from None
        self._live.append(live)
        return live

    def end(self) -> None:
        """A test is over: what it plays is closed."""
        for live in self._live:
            live.close()
        self._live.clear()

    def conclude(self, failed: CaseFailed) -> Outcome:
        """Confirm what a test failed on, and keep it in a run folder: where that cannot be written, in one below TMPDIR."""
        self.end()
        trial, run = failed.trial, self._drop_unneeded_fixes(failed.trial)
        case = replace(trial.case, name=self._name)
        try:
            folder = new_run_folder(self._out, self._name)
        except InputError:
            folder = new_run_folder(Path(tempfile.mkdtemp(prefix="eagletwin-runs-")), self._name)
        command = f"pytest {' '.join(sys.argv[1:])}".rstrip()
        found = str(trial.signature or "")
        write_script(folder, case, replace(run, finding=found), command=command, source=self.host.source)
        engine = self.host.engine(case, run.applied, run.kernels)
        again = shlex.join(["python", str(folder / SCRIPT)])
        outcome = confirm(engine, case, trial.verdict, trial.before, folder, run, again, self.host)
        write_run(*outcome.of_page)
        return outcome

    def _drop_unneeded_fixes(self, found: Trial) -> RunSpec:
        """The run of what a test failed on, with those candidate fixes of the ledger alone that it needs."""
        run, names = apart(self._trials.run)
        alone = self._trials.look_alone(found.case) if names else found
        if not names or alone.signature != found.signature:
            return self._trials.run
        matcher = KnownBugMatcher(self.host, run)
        return matcher.trials(entries_of(needed_in(matcher, alone, names, run.view))).run

    def close(self) -> None:
        self.host.close()

    def _note(self, verdict: Verdict) -> None:
        """Count what a case exercised, and report it to Hypothesis where it runs the test."""
        self.reached.update(verdict.exercised)
        hypothesis = _hypothesis()
        if hypothesis is not None:
            for name in verdict.exercised:
                hypothesis.event(name)


def _hypothesis() -> Any:
    """Hypothesis, where it runs the test; else None."""
    hypothesis = sys.modules.get("hypothesis")
    return hypothesis if hypothesis is not None and hypothesis.currently_in_test_context() else None


class LiveCase:
    """A case that a test plays step by step; each step is judged, and raises CaseFailed as soon as something diverged.

    Its end is judged by finish() alone: a test that passes without it fails.
    """

    def __init__(self, twin: Twin, case: Case) -> None:
        self._twin = twin
        trials = twin._trials
        self._without = trials.run.without
        self._scratch = tempfile.TemporaryDirectory(prefix="eagletwin-")
        engine = trials.host.engine(case, trials.run.patches, trials.run.kernels)
        self._failed = False
        self._left = True
        try:
            self._session = engine.session(case, Path(self._scratch.name), trials.run.limits)
        except BaseException:
            self._scratch.cleanup()
            raise

    @property
    def case(self) -> Case:
        """All that was added so far: a case like any other."""
        return self._session.case

    @property
    def trace(self) -> Trace:
        return self._session.trace

    def step(self, requests: tuple[Request, ...] = (), events: tuple[Event, ...] = (), chunk: int | None = None) -> None:
        """Run one scheduler iteration, before which these requests arrive and these events happen.

        chunk: the budget of the next prefill batch, if that is not to be chunked_prefill_size.
        """
        self._judge(self._session.step(requests, events, chunk))

    def finish(self) -> Verdict:
        """Run to the end and judge the whole: nothing short of equal passes."""
        self._left = False
        return self._judge(self._session.finish())

    def close(self) -> None:
        """End it, whatever became of it. Closing again does nothing."""
        if sys.exc_info()[0] is not None and _hypothesis() is not None:  # it was rejected, or failed otherwise
            self._left = False
        self._session.close()
        self._scratch.cleanup()

    @property
    def failed(self) -> bool:
        return self._failed

    @property
    def left(self) -> bool:
        """Whether nothing has judged its end: neither finish() nor a divergence before."""
        return self._left and not self._failed

    def _judge(self, trace: Trace) -> Verdict:
        verdict = judge(trace, self._without)
        stopped = trace.header.ending.kind == "stopped" and verdict.status == "unknown"
        trial = Trial(trace.header.case, verdict, trace.header, (), differs=trace.differs, changes=trace.changes)
        if verdict.status != "equal" and not stopped and not trial.unrun:
            self._failed = True
            raise CaseFailed(trial)
        if self._session.over:
            self._twin.unchecked.update(trace.header.fallbacks)
            self._twin._note(verdict)
            self._twin._add_changes(trial)
        return verdict


# What a failed case leaves for programs: properties for JUnit XML, and an annotation for GitHub.


@dataclass(frozen=True, slots=True)
class Reported:
    """A failed case when its test is over: as a line, as an argument, and as (name, value) for programs."""

    line: str
    text: str
    properties: tuple[tuple[str, str], ...]

    def annotation(self, path: Path, line: int, test: str) -> str:
        """The line of a log that GitHub shows beside the test. Files are named from the folder that GitHub checked out."""
        facts = dict(self.properties)
        more = [f"{name}: {facts[key]}" for name, key in (("again", "again"), ("report", "report")) if key in facts]
        return error("\n".join([self.line, *more]), f"{test}: {facts['rule']}", _from_workspace(path), line)


def conclude(twin: Twin, failed: CaseFailed) -> Reported:
    """Confirm and keep a failed case. A failure that cannot be confirmed is one all the same."""
    trial = failed.trial
    try:
        outcome = twin.conclude(failed)
    except (EagletwinError, OSError) as unconfirmed:
        text = f"{failed.argument}\n\n  It was seen once, and could not be confirmed: {unconfirmed}"
        return Reported(str(failed), text, tuple(_facts(trial.header, trial.verdict)))
    header, verdict = outcome.trace.header, outcome.verdict
    facts = (*_facts(header, verdict), *_outcome_facts(outcome))
    return Reported(headline(header, verdict), f"{outcome.report}\n  folder: {outcome.folder}", facts)


def _facts(header: Header, verdict: Verdict) -> list[tuple[str, str]]:
    found = verdict.first
    facts = [("status", verdict.status), ("rule", verdict.rule or verdict.status), (header.engine.name, header.engine.version)]
    if found is not None:
        facts.append(("place", place_of(found, header.case.num_steps, model_of(header).mtp_layers > 0)))
    return facts


def _outcome_facts(outcome: Outcome) -> list[tuple[str, str]]:
    facts = (("entry", outcome.known), ("again", outcome.again), ("report", str(outcome.folder / NAME)))
    return [(name, value) for name, value in facts if value]


def _from_workspace(path: Path) -> str:
    workspace = os.environ.get("GITHUB_WORKSPACE", "")
    return str(path.relative_to(workspace)) if workspace and path.is_relative_to(workspace) else str(path)
