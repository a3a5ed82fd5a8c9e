"""What a test gets from the pytest plugin: check a case, or play one step by step, and fail with the argument.

A test that fails is concluded once, when it is over: what it failed on is confirmed in fresh forks and kept in a run folder.
"""

import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from .case import Case, Event, Request
from .check import Outcome, confirm
from .engines.mode import CPU, Mode
from .engines.process import Host
from .engines.source import INSTALLED, Source
from .engines.wire import Kernels
from .errors import InputError
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


class TimeUp(Exception):
    """A case cannot be played: the test's time was up before."""


class Twin:
    """Runs the cases of a test session on one host. A test may change the engine for itself (`begin`).

    ran      cases that an engine ran; skipped: cases that were not run, because the test's time was up
    reached  how many cases exercised what
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
        self.skipped = 0
        self.reached: Counter[str] = Counter()
        self._out = out
        self._usual = kernels
        self._seconds = seconds
        self._all: dict[tuple[tuple[Patch, ...], Kernels, frozenset[str]], Trials] = {}
        self._name = "case"
        self._live: list[LiveCase] = []
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
        self._looked = self._skipped_here = 0
        self.end()

    @property
    def ran(self) -> int:
        return sum(trials.ran for trials in self._all.values())

    def check(self, case: Case) -> Verdict:
        """Run and judge a case; raise CaseFailed unless it is equal.

        Where Hypothesis draws the cases, one that was run before is not run again, and one that does not reach what a patch
        edits is rejected. When the test's time is up, a case is not run, and counted.
        """
        __tracebackhide__ = True
        hypothesis = _hypothesis()
        trial = self._trials.known(case) if hypothesis is not None else None
        if trial is None:
            if time.monotonic() > self._deadline:
                self.skipped += 1
                self._skipped_here += 1
                return Verdict(status="unknown", reason="not run: the test's time was up")
            trial = self._trials.look(case, anew=True)
        self._looked += 1
        self._note(trial.verdict)
        if trial.verdict.vacuous and hypothesis is not None:
            hypothesis.reject()
        if trial.verdict.status != "equal":
            raise CaseFailed(trial)
        return trial.verdict

    @property
    def only_skipped(self) -> bool:
        """Whether the test that runs has asked for cases, and its time was up for all of them."""
        return self._skipped_here > 0 and self._looked == 0

    def start(self, case: Case) -> "LiveCase":
        """Begin to play a case step by step. The engine is its own until it is closed or the test is over."""
        if time.monotonic() > self._deadline:
            self.skipped += 1
            hypothesis = _hypothesis()
            if hypothesis is not None:
                hypothesis.reject()
            raise TimeUp("not run: the test's time was up")
        self._looked += 1
        live = LiveCase(self, case)
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
        trial, trials = failed.trial, self._trials
        case = msgspec.structs.replace(trial.case, name=self._name)
        try:
            folder = new_run_folder(self._out, self._name)
        except InputError:
            folder = new_run_folder(Path(tempfile.mkdtemp(prefix="eagletwin-runs-")), self._name)
        command = f"pytest {' '.join(sys.argv[1:])}".rstrip()
        write_script(
            folder,
            case,
            command=command,
            source=self.host.source,
            mode=self.host.mode,
            patches=trials.patches,
            kernels=trials.kernels,
            without=trials.without,
        )
        engine = self.host.engine(case, trials.patches, trials.kernels)
        again = f"python {folder / 'repro.py'}"
        return confirm(engine, case, trial.verdict, trial.before, folder, trials.limits, without=trials.without, again=again)

    def close(self) -> None:
        self.host.close()

    def _note(self, verdict: Verdict) -> None:
        """What a case exercised: counted, and told to Hypothesis where it runs the test."""
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
    """A case that a test plays step by step; each step is judged, and raises CaseFailed as soon as something diverged."""

    def __init__(self, twin: Twin, case: Case) -> None:
        self._twin = twin
        trials = twin._trials
        self._without = trials.without
        self._scratch = tempfile.TemporaryDirectory(prefix="eagletwin-")
        engine = trials.host.engine(case, trials.patches, trials.kernels)
        self._failed = False
        try:
            self._session = engine.session(case, Path(self._scratch.name), trials.limits)
        except BaseException:
            self._scratch.cleanup()
            raise

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
        """End it, whatever became of it. Closing again does nothing."""
        self._session.close()
        self._scratch.cleanup()

    @property
    def failed(self) -> bool:
        return self._failed

    def _judge(self, trace: Trace) -> Verdict:
        verdict = judge(trace, self._without)
        stopped = trace.header.ending.kind == "stopped" and verdict.status == "unknown"
        if verdict.status != "equal" and not stopped:
            self._failed = True
            raise CaseFailed(Trial(trace.header.case, verdict, trace.header, ()))
        if self._session.over:
            self._twin._note(verdict)
        return verdict
