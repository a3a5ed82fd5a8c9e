"""Generate cases until one diverges, shrink it to one that a person can hold in the head, and keep all of it.

Hypothesis draws the cases (cases/strategies.py) and shrinks; trial.py runs them; check.py makes sure. A search goes through
blocks of cases, each with a focus: most cases of a block share one engine.
"""

import contextlib
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import hypothesis
import msgspec
from hypothesis import HealthCheck, Phase, settings
from hypothesis.strategies import SearchStrategy

from eagletwin.cases.profiles import draw_from_seeds_alone
from eagletwin.cases.strategies import cases, focus_of
from eagletwin.harness.dtype import WIDEST

from .case import Case, encode_case, pretty_case
from .check import Outcome, alike, confirm
from .repro import write_script
from .trial import Trial, Trials
from .words import count

BLOCK = 20  # cases with one focus: building its few engines takes about as long as running ten cases


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found.

    found     the case as it was generated; outcome: its smallest form, confirmed
    cases, seconds            until it was found
    shrink_looks, shrink_seconds  until it was smallest; partial: time was up before
    """

    kind: str
    found: Case
    outcome: Outcome
    cases: int
    seconds: float
    shrink_looks: int
    shrink_seconds: float
    partial: bool


@dataclass(slots=True)
class Tally:
    """What a search came to so far."""

    cases: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    exercised: Counter[str] = field(default_factory=Counter)
    accept_lens: Counter[str] = field(default_factory=Counter)
    configurations: Counter[str] = field(default_factory=Counter)
    set_aside: Counter[str] = field(default_factory=Counter)
    choices: int = 0
    ties: int = 0
    headroom: float = 0.0
    fallbacks: Counter[str] = field(default_factory=Counter)

    def add(self, trial: Trial) -> None:
        verdict, case = trial.verdict, trial.case
        self.cases += 1
        self.statuses[verdict.status] += 1
        self.exercised.update(verdict.exercised)
        self.choices, self.ties = self.choices + verdict.choices, self.ties + verdict.ties
        self.headroom = max(self.headroom, verdict.headroom)
        self.fallbacks.update(trial.header.fallbacks)
        size = f" with {case.num_draft_tokens} nodes" if case.topk > 1 else ""
        self.configurations[
            f"{case.model}, num_steps {case.num_steps}, topk {case.topk}{size}, page_size {case.page_size}"
        ] += 1
        lengths = {record.numbers["accept_len"] for record in trial.header.records if record.stage == "verify"}
        self.accept_lens.update(f"{length} of {case.num_steps + 1}" for length in lengths)


class _Shown(Exception):
    """The case shows what is being shrunk."""


class _Over(BaseException):
    """Leaves Hypothesis: there is nothing more to draw. Not an Exception, so that it is not taken for a failing test."""


class Fuzz:
    """One search. `search` yields findings as they come; `tally` is up to date at any time.

    seconds, max_cases  when to stop generating; shrink_seconds: when to stop shrinking, for each finding
    command             what a person types to search like this again
    held                fields of cases.strategies.Focus that all cases have
    draws               the strategy of cases of a focus, with what of it is held
    """

    def __init__(
        self,
        trials: Trials,
        folder: Path,
        *,
        seed: int,
        seconds: float,
        max_cases: int,
        shrink_seconds: float,
        command: str,
        held: Mapping[str, Any] = MappingProxyType({}),
        draws: Callable[..., SearchStrategy[Case]] = cases,
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        draw_from_seeds_alone()
        self.tally = Tally()
        self.folder = folder
        self.found: list[Path] = []  # folders of findings, also of one that is still being shrunk
        self._trials = trials
        self._seed = seed
        self._shrink_seconds = shrink_seconds
        self._max_cases = max_cases
        self._command = command
        self._held = held
        self._draws = draws
        self._progress = progress
        self._begun = time.monotonic()
        self._until = self._begun + seconds
        self._set_aside: set[str] = set()  # kinds that were found: counted from then on, and not found again

    @property
    def seed(self) -> int:
        return self._seed

    @property
    def patched(self) -> bool:
        return bool(self._trials.patches)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun

    def search(self) -> Iterator[Finding]:
        """Draw cases until time or number is up. Each kind of finding is yielded once."""
        block = 0
        while not self._enough():
            search = _Block(self, block)
            with contextlib.suppress(_Over):
                search.run()
            if search.first is not None:
                finding = search.conclude()
                self._set_aside.add(finding.kind)
                yield finding
            self._progress(self._line())
            block += 1
        (self.folder / "now.json").unlink(missing_ok=True)

    def _enough(self) -> bool:
        return time.monotonic() >= self._until or self.tally.cases >= self._max_cases

    def _line(self) -> str:
        tally = self.tally
        aside = sum(tally.set_aside.values())
        more = f", {aside} of a kind already found" if aside else ""
        return f"{count(tally.cases, 'case')} in {self.seconds:.0f} s, {tally.cases / max(self.seconds, 0.1):.1f}/s{more}"


class _Block:
    """Up to BLOCK cases with one focus, and the shrinking of what the first of them shows."""

    def __init__(self, fuzz: Fuzz, number: int) -> None:
        self.first: Trial | None = None
        self._fuzz = fuzz
        self._trials = fuzz._trials
        self._number = number
        self._smallest: Trial | None = None  # by _size, at any time
        self._last: Trial | None = None  # that showed it
        self._looks = 0
        self._told = 0.0  # when progress was last told
        self._cases = self._seconds = self._found_at = 0.0
        self._partial = self._steady = False
        self._folder = fuzz.folder

    def run(self) -> None:
        """Draw and shrink. Raises _Over when the search is to end."""
        fuzz = self._fuzz

        focus = focus_of(fuzz._seed * 7919 + self._number, WIDEST[fuzz._trials.host.mode.dtype], **fuzz._held)

        @hypothesis.seed(fuzz._seed * 1_000_003 + self._number)
        @settings(
            max_examples=BLOCK,
            phases=(Phase.generate, Phase.shrink),
            database=None,
            deadline=None,
            report_multiple_bugs=False,
            print_blob=False,
            suppress_health_check=list(HealthCheck),
        )
        @hypothesis.given(fuzz._draws(focus, held=tuple(fuzz._held)))
        def look(case: Case) -> None:
            if self._generated(case) if self.first is None else self._shrunk(case):
                raise _Shown  # in one place: Hypothesis tells failures apart by where they were raised

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", hypothesis.errors.HypothesisWarning)  # its own limit on shrinking
            try:
                look()
            except _Shown:  # the last that Hypothesis ran is what it found to be the simplest
                self._smallest = self._last

    def _generated(self, case: Case) -> bool:
        """Whether a drawn case shows something new."""
        fuzz = self._fuzz
        if fuzz._enough():
            raise _Over
        if self._trials.known(case) is not None:
            return False
        (fuzz.folder / "now.json").write_text(
            pretty_case(case), encoding="utf-8"
        )  # if everything dies, this is the case that did it
        trial = self._trials.look(case)
        fuzz.tally.add(trial)
        if not trial.kind:
            return False
        if trial.kind in fuzz._set_aside:
            fuzz.tally.set_aside[trial.kind] += 1
            return False
        self.first = self._smallest = self._last = trial
        self._cases, self._seconds, self._found_at = fuzz.tally.cases, fuzz.seconds, time.monotonic()
        self._told = self._found_at
        self._folder = fuzz.folder / f"finding-{len(fuzz.found) + 1}"
        (self._folder / "minimal").mkdir(parents=True)
        fuzz.found.append(self._folder)
        (self._folder / "found.json").write_text(pretty_case(case), encoding="utf-8")
        self._keep_smallest()
        fuzz._progress(f"case {self._cases}, {self._seconds:.1f} s: {trial.verdict.status} {trial.kind}; shrinking")
        self._steady = self._shows_alone(trial)
        if not self._steady:  # what hangs on the cases before it does not get smaller by itself
            raise _Over
        return True

    def _shrunk(self, case: Case) -> bool:
        """Whether a smaller case shows the same. Raises _Over when time is up: Hypothesis would go on for another minute."""
        assert self.first is not None
        assert self._smallest is not None
        until = self._iteration(self._smallest)
        trial = self._trials.known(case, until)
        if trial is None:
            if time.monotonic() > self._found_at + self._fuzz._shrink_seconds:
                self._partial = True
                raise _Over
            self._looks += 1
            trial = self._trials.look(case, until)
            if trial.kind == self.first.kind and trial.before and not self._shows_alone(trial):
                self._trials.forget(case)
                return False
        if trial.kind != self.first.kind:
            return False
        self._last = trial
        if _size(case) < _size(self._smallest.case):
            self._smallest = trial
            self._keep_smallest()
        if time.monotonic() > self._told + 5:
            self._told = time.monotonic()
            sizes = ", ".join(f"{len(request.prompt)}+{request.max_new_tokens}" for request in self._smallest.case.requests)
            self._fuzz._progress(f"{count(self._looks, 'more run')}; smallest so far (prompt+new): {sizes}")
        return True

    def _iteration(self, trial: Trial) -> int:
        """Where a smaller case must show it: no later than the smallest so far. Runs are stopped there. -1: anywhere, as nobody
        counts a kernel's iterations."""
        first = trial.verdict.first
        return first.iteration if first is not None and first.stage != "kernel" else -1

    def _shows_alone(self, trial: Trial) -> bool:
        alone = self._trials.look_alone(trial.case)
        return alike(alone, trial.verdict)

    def _keep_smallest(self) -> None:
        """The smallest so far is on disk at any time."""
        assert self._smallest is not None
        minimal, fuzz = self._folder / "minimal", self._fuzz
        case = msgspec.structs.replace(self._smallest.case, name=f"minimal-{self._folder.name}")
        (minimal / "case.json").write_text(pretty_case(case), encoding="utf-8")
        trials = self._trials
        write_script(
            minimal,
            case,
            command=fuzz._command,
            source=trials.host.source,
            mode=trials.host.mode,
            seed=fuzz._seed,
            patches=trials.patches,
            kernels=trials.kernels,
            without=trials.without,
            view=trials.view,
        )

    def conclude(self) -> Finding:
        """Confirm the smallest case in fresh forks."""
        assert self.first is not None
        assert self._smallest is not None
        self._keep_smallest()
        trials, smallest = self._trials, self._smallest
        case = msgspec.structs.replace(smallest.case, name=f"minimal-{self._folder.name}")
        engine = trials.host.engine(case, trials.patches, trials.kernels)
        outcome = confirm(
            engine,
            case,
            smallest.verdict,
            smallest.before,
            self._folder / "minimal",
            trials.limits,
            without=trials.without,
            view=trials.view,
            again=f"python {self._folder / 'minimal' / 'repro.py'}",
        )
        return Finding(
            kind=self.first.kind,
            found=self.first.case,
            outcome=outcome,
            cases=int(self._cases),
            seconds=self._seconds,
            shrink_looks=self._looks,
            shrink_seconds=time.monotonic() - self._found_at,
            partial=self._partial,
        )


def _size(case: Case) -> tuple[int, bytes]:
    data = encode_case(case)
    return len(data), data
