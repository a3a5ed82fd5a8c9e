"""What a test gets from the pytest plugin: check a case, or play one step by step, and fail with the argument.

A test that fails is concluded once, when it is over: what it failed on is confirmed in fresh forks and kept in a run folder.
"""

import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import msgspec

from .case import Case, Event, Request
from .check import Outcome, confirm
from .engines.process import Host
from .engines.wire import Kernels
from .judge import Verdict, judge
from .patch import Patch
from .paths import new_run_folder
from .report.argument import argue
from .repro import write_script
from .trace import Trace
from .trial import Trial, Trials


class CaseFailed(AssertionError):
    """A case that is not equal; the message is the argument."""

    def __init__(self, trial: Trial) -> None:
        super().__init__(argue(trial.header, trial.verdict))
        self.trial = trial


class Twin:
    """Runs the cases of a test session on one host. A test may change the engine for itself (`begin`).

    ran      cases that an engine ran; skipped: cases that were not run, because the test's time was up
    reached  how many cases exercised what
    """

    def __init__(self, out: Path, *, kernels: Kernels = "fast", seconds: float = float("inf")) -> None:
        self.host = Host()
        self.skipped = 0
        self.reached: Counter[str] = Counter()
        self._out = out
        self._usual = kernels
        self._seconds = seconds
        self._all: dict[tuple[tuple[Patch, ...], Kernels, frozenset[str]], Trials] = {}
        self._name = "case"
        self.begin("case")

    def begin(
        self,
        name: str,
        *,
        patches: tuple[Patch, ...] = (),
        kernels: Kernels | None = None,
        without: frozenset[str] = frozenset(),
    ) -> None:
        """A test begins: its name, and what it changes."""
        key = (patches, kernels or self._usual, without)
        if key not in self._all:
            self._all[key] = Trials(self.host, patches=patches, kernels=key[1], without=without)
        self._trials = self._all[key]
        self._name = name
        self._deadline = time.monotonic() + self._seconds
        self._smallest: Trial | None = None

    @property
    def ran(self) -> int:
        return sum(trials.ran for trials in self._all.values())

    def check(self, case: Case) -> Verdict:
        """Run and judge a case; raise CaseFailed unless it is equal.

        Once a case has failed in this test, smaller ones run no further than where it failed: that is shrinking. When the
        test's time is up, a case that is not known is not run, and counted.
        """
        until = -1
        if self._smallest is not None and self._smallest.verdict.first is not None:
            until = self._smallest.verdict.first.iteration
        trial = self._trials.known(case, until)
        if trial is None and time.monotonic() > self._deadline:
            self.skipped += 1
            return Verdict(status="unknown", reason="not run: the test's time was up")
        trial = trial or self._trials.look(case, until)
        self._note(trial.verdict)
        if trial.kind:
            if self._smallest is None or self._smallest.kind == trial.kind:
                self._smallest = trial
            raise CaseFailed(trial)
        return trial.verdict

    def start(self, case: Case) -> "LiveCase":
        """Begin to play a case step by step."""
        return LiveCase(self, case)

    def conclude(self, failed: CaseFailed) -> Outcome:
        """Confirm what a test failed on, and keep it in a run folder."""
        trial, trials = failed.trial, self._trials
        case = msgspec.structs.replace(trial.case, name=self._name)
        folder = new_run_folder(self._out, self._name)
        command = f"pytest {' '.join(sys.argv[1:])}".rstrip()
        write_script(folder, case, command=command, patches=trials.patches, kernels=trials.kernels, without=trials.without)
        engine = self.host.engine(case, trials.patches, trials.kernels)
        again = f"python {folder / 'repro.py'}"
        return confirm(engine, case, trial.verdict, trial.before, folder, trials.limits, without=trials.without, again=again)

    def close(self) -> None:
        self.host.close()

    def _note(self, verdict: Verdict) -> None:
        """What a case exercised: counted, and told to Hypothesis where it runs the test."""
        self.reached.update(verdict.exercised)
        hypothesis = sys.modules.get("hypothesis")
        if hypothesis is not None and hypothesis.currently_in_test_context():
            for name in verdict.exercised:
                hypothesis.event(name)


class LiveCase:
    """A case that a test plays step by step; each step is judged, and raises CaseFailed as soon as something diverged."""

    def __init__(self, twin: Twin, case: Case) -> None:
        self._twin = twin
        trials = twin._trials
        self._without = trials.without
        self._scratch = tempfile.TemporaryDirectory(prefix="eagletwin-")
        engine = trials.host.engine(case, trials.patches, trials.kernels)
        self._session = engine.session(case, Path(self._scratch.name), trials.limits)
        self._failed = False

    @property
    def case(self) -> Case:
        """What it has come to: a case like any other."""
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
        return self._judge(self._session.finish())

    def close(self) -> None:
        """End it, whatever became of it."""
        if not self._session.over:
            self._session.finish()
        self._scratch.cleanup()

    @property
    def failed(self) -> bool:
        return self._failed

    def _judge(self, trace: Trace) -> Verdict:
        verdict = judge(trace, self._without)
        trial = Trial(trace.header.case, verdict, trace.header, ())
        if trial.kind:
            self._failed = True
            raise CaseFailed(trial)
        if self._session.over:
            self._twin._note(verdict)
        return verdict
