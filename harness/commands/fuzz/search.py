"""Generate cases until one diverges, shrink it to one that a person can hold in the head, and keep all of it.

Hypothesis draws the cases (cases/strategies.py) and shrinks; check/trials.py runs them; check/confirm.py makes sure. A search
goes through blocks of cases, each with a focus: most cases of a block share one engine.
"""

import contextlib
import shlex
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import msgspec
from hypothesis import HealthCheck, Phase, settings
from hypothesis.strategies import SearchStrategy

from eagletwin.cases.profiles import draw_from_seeds_alone
from eagletwin.cases.strategies import cases, focus_of
from eagletwin.harness.check.confirm import Outcome, alike, confirm
from eagletwin.harness.check.repro import SCRIPT, write_script
from eagletwin.harness.check.trials import Trial, Trials
from eagletwin.harness.core.case import Case, encode_case, pretty_case
from eagletwin.harness.core.differs import Changes
from eagletwin.harness.core.dtype import WIDEST
from eagletwin.harness.core.errors import HarnessError
from eagletwin.harness.core.progress import Line
from eagletwin.harness.core.signature import Signature, signature_of
from eagletwin.harness.core.words import count
from eagletwin.harness.page.run import write_run

from .smaller import smaller
from .unsearched import topics_of

BLOCK = 20  # cases with one focus: building its few engines takes about as long as running ten cases


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a search is asked for.

    seconds, max_cases  when to stop generating; shrink_seconds: when to stop shrinking, for each finding
    command             what a person types to search like this again
    held                fields of cases.strategies.Focus that all cases have
    draws               the strategy of cases of a focus, with what of it is held
    unmet               what a case lacks of what all cases are to have; empty: nothing
    """

    seed: int
    seconds: float
    max_cases: int
    shrink_seconds: float
    command: str
    held: Mapping[str, Any] = field(default_factory=dict)
    draws: Callable[..., SearchStrategy[Case]] = cases
    unmet: Callable[[Case], str] = lambda case: ""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found.

    signature what all smaller cases had to show as well
    found     the case as it was generated; outcome: its smallest form, confirmed
    cases, seconds            until it was found
    shrink_looks, shrink_seconds  until it was smallest; partial: time was up before
    """

    signature: Signature
    found: Case
    outcome: Outcome
    cases: int
    seconds: float
    shrink_looks: int
    shrink_seconds: float
    partial: bool


@dataclass(slots=True)
class Aside:
    """What a search saw and did not look into: cases that show what was found before, or what a smaller case showed in place of
    what was being shrunk; and cases that the reference cannot decide. Run once, and not confirmed.

    example  file of the first such case; cases: how many there were
    """

    signature: Signature
    example: Path
    cases: int = 0
    undecided: bool = False


class Configuration(NamedTuple):
    """The sizes of a case by which a search is summed up. nodes: of the verify tree."""

    model: str
    num_steps: int
    topk: int
    nodes: int
    page_size: int


# Cases that a search must have run to say that it found nothing, as pytest does (`--eagletwin-min-cases`).
LEAST = 10
MOST_UNDECIDED = 0.1  # of its cases, the share that the reference may not have decided


@dataclass(slots=True)
class Tally:
    """Figures of a search so far. topics: what its cases had, of unsearched.TOPICS."""

    cases: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    exercised: Counter[str] = field(default_factory=Counter)
    accept_lens: Counter[str] = field(default_factory=Counter)
    configurations: Counter[Any] = field(default_factory=Counter)
    topics: Counter[str] = field(default_factory=Counter)
    choices: int = 0
    ties: int = 0
    undecided: int = 0
    headroom: float = 0.0
    fallbacks: Counter[str] = field(default_factory=Counter)
    changes: Changes = field(default_factory=Changes)

    def add(self, trial: Trial) -> None:
        verdict, case = trial.verdict, trial.case
        self.cases += 1
        self.statuses[verdict.status] += 1
        self.undecided += verdict.undecided
        self.exercised.update(verdict.exercised)
        self.choices, self.ties = self.choices + verdict.choices, self.ties + verdict.ties
        self.headroom = max(self.headroom, verdict.headroom)
        self.fallbacks.update(trial.header.fallbacks)
        self.changes.add(trial.differs)
        self.topics.update(topics_of(case))
        self.configurations[Configuration(case.model, case.num_steps, case.topk, case.verify_nodes, case.page_size)] += 1
        lengths = {record.numbers["accept_len"] for record in trial.header.records if record.stage == "verify"}
        self.accept_lens.update(f"{length} of {case.num_steps + 1}" for length in lengths)


class _Shown(Exception):
    """The case shows what is being shrunk."""


class _Over(BaseException):
    """Leaves Hypothesis: there is nothing more to draw. Not an Exception, so that it is not taken for a failing test."""


class Fuzz:
    """One search. `search` yields findings as they come; `tally` is up to date at any time."""

    def __init__(self, trials: Trials, folder: Path, plan: Plan, progress: Callable[[str], None] = lambda text: None) -> None:
        draw_from_seeds_alone()
        self.tally = Tally()
        self.folder = folder
        self.plan = plan
        self.found: list[Path] = []  # folders of findings, with the one that is still being shrunk
        self.known: set[Signature] = set()  # what was found: set aside from then on
        self.asides: dict[Signature, Aside] = {}
        self.shrinking: _Block | None = None
        self.trials = trials
        self._progress = progress
        self.line = Line()
        self._begun = time.monotonic()
        self._until = self._begun + plan.seconds

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun

    def search(self) -> Iterator[Finding]:
        """Draw cases until time or number is up. Of several cases with one signature the first alone is yielded."""
        block = 0
        while not self._enough():
            search = self.shrinking = _Block(self, block)
            with contextlib.suppress(_Over):
                search.run()
            if search.failed is not None:
                raise search.failed
            if search.first is not None:
                finding, self.shrinking = search.conclude(), None
                yield finding
            self._progress(self._line())
            block += 1
        (self.folder / "now.json").unlink(missing_ok=True)

    @property
    def looked_enough(self) -> bool:
        """Whether a search that found nothing says something: one case was equal, as many ran as were asked for, or LEAST,
        whose first ones are small, and no more than MOST_UNDECIDED of them were left undecided."""
        tally = self.tally
        ran_enough = bool(tally.statuses["equal"]) and tally.cases >= min(LEAST, self.plan.max_cases)
        return ran_enough and tally.undecided <= MOST_UNDECIDED * tally.cases

    def _enough(self) -> bool:
        return time.monotonic() >= self._until or self.tally.cases >= self.plan.max_cases

    def keep_elsewhere(self, folder: Path) -> None:
        """Where the run folder cannot be written: put what was still being shrunk into another one."""
        if self.shrinking is not None:
            self.shrinking.keep_in(folder)

    def set_aside(self, trial: Trial) -> None:
        """Count what a trial shows, and keep the first case that does."""
        signature = trial.signature
        assert signature is not None
        aside = self.asides.get(signature)
        if aside is None:
            file = self.folder / "set-aside" / f"{len(self.asides) + 1}-{signature.slug}.json"
            file.parent.mkdir(exist_ok=True)
            file.write_text(pretty_case(trial.case), encoding="utf-8")
            aside = self.asides[signature] = Aside(signature, file, undecided=trial.verdict.undecided)
        aside.cases += 1

    def _line(self) -> str:
        tally = self.tally
        aside = sum(one.cases for one in self.asides.values() if one.signature in self.known)
        more = f", {aside} with what was found already" if aside else ""
        return f"{count(tally.cases, 'case')} in {self.seconds:.0f} s, {tally.cases / max(self.seconds, 0.1):.1f}/s{more}"


class _Block:
    """Up to BLOCK cases with one focus, and the shrinking of what the first of them shows."""

    def __init__(self, fuzz: Fuzz, number: int) -> None:
        self.first: Trial | None = None
        self.failed: Exception | None = None  # what ended it, and is no word on the worker
        self._fuzz = fuzz
        self._trials = fuzz.trials
        self._number = number
        self._smallest: Trial | None = None  # by _size, at any time
        self._last: Trial | None = None  # that showed it
        self._looks = 0
        self._reported_at, self._said = 0.0, ""  # when progress was last reported, and what became smaller until then
        self._cases = self._seconds = self._found_at = 0.0
        self._partial = self._steady = False
        self._folder = fuzz.folder

    def run(self) -> None:
        """Draw and shrink. Raises _Over when the search is to end."""
        fuzz = self._fuzz

        plan = fuzz.plan
        focus = focus_of(plan.seed * 7919 + self._number, WIDEST[fuzz.trials.host.mode.dtype], **plan.held)

        @hypothesis.seed(plan.seed * 1_000_003 + self._number)
        @settings(
            max_examples=BLOCK,
            phases=(Phase.generate, Phase.shrink),
            database=None,
            deadline=None,
            report_multiple_bugs=False,
            print_blob=False,
            suppress_health_check=list(HealthCheck),
        )
        @hypothesis.given(plan.draws(focus, held=tuple(plan.held)))
        def look(case: Case) -> None:
            try:
                shows = self._generated(case) if self.first is None else self._shrunk(case)
            except (HarnessError, OSError) as error:  # Hypothesis would shrink it, as if the case had failed
                self.failed = error
                raise _Over from error
            if shows:
                raise _Shown  # in one place: Hypothesis tells failures apart by where they were raised

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", hypothesis.errors.HypothesisWarning)  # its own limit on shrinking
            try:
                look()
            except _Shown:  # the last case that Hypothesis ran is the simplest it found
                self._smallest = self._last

    def _generated(self, case: Case) -> bool:
        """Whether a drawn case shows something new."""
        fuzz = self._fuzz
        if fuzz._enough():
            raise _Over
        if self._trials.known(case) is not None:
            return False
        if unmet := fuzz.plan.unmet(case):
            raise HarnessError(
                f"a generated case lacks what was asked for: {unmet}",
                consequence="the search ended there, since it would have searched something else",
                remedy="this is a bug of eagletwin: report it with the command",
            )
        (fuzz.folder / "now.json").write_text(
            pretty_case(case), encoding="utf-8"
        )  # if everything dies, this is the case that did it
        trial = self._trials.look(case)
        fuzz.tally.add(trial)
        fuzz.line.done(f"{case.model}, num_steps {case.num_steps}, topk {case.topk}")
        if trial.signature is None:
            return False
        if trial.verdict.undecided or trial.signature in fuzz.known:
            fuzz.set_aside(trial)
            return False
        self.first = self._smallest = self._last = trial
        self._cases, self._seconds, self._found_at = fuzz.tally.cases, fuzz.seconds, time.monotonic()
        self._reported_at = self._found_at
        self._folder = fuzz.folder / f"finding-{len(fuzz.found) + 1}"
        (self._folder / "minimal").mkdir(parents=True)
        fuzz.found.append(self._folder)
        (self._folder / "found.json").write_text(pretty_case(case), encoding="utf-8")
        self._keep_smallest()
        fuzz._progress(f"case {self._cases}, {self._seconds:.1f} s: {trial.verdict.status} {trial.signature}; shrinking")
        self._steady = self._shows_alone(trial)
        if not self._steady:  # what depends on the cases before it does not get smaller by itself
            raise _Over
        return True

    def _shrunk(self, case: Case) -> bool:
        """Whether a smaller case shows the same. Raises _Over when time is up: Hypothesis would go on for another minute."""
        assert self.first is not None
        assert self._smallest is not None
        until = self._iteration(self._smallest)
        trial = self._trials.known(case, until)
        if trial is None:
            if time.monotonic() > self._found_at + self._fuzz.plan.shrink_seconds:
                self._partial = True
                raise _Over
            self._looks += 1
            self._fuzz.line.look(f"{self.first.signature}: smaller case {self._looks}")
            trial = self._trials.look(case, until)
            if trial.signature not in (None, self.first.signature):
                self._fuzz.set_aside(trial)
            elif trial.signature is not None and trial.before and not self._shows_alone(trial):
                self._trials.forget(case)
                return False
        if trial.signature != self.first.signature:
            return False
        self._last = trial
        if _size(case) < _size(self._smallest.case):
            self._smallest = trial
            self._keep_smallest()
        if time.monotonic() > self._reported_at + 5:
            self._reported_at = time.monotonic()
            changes = smaller(self.first.case, self._smallest.case)
            news = changes if changes != self._said else "nothing smaller since then"
            self._said = changes
            self._fuzz._progress(f"{count(self._looks, 'more run')}: {news or 'nothing smaller yet'}")
        return True

    def _iteration(self, trial: Trial) -> int:
        """Where a smaller case must show it: no later than the smallest so far. Runs are stopped there. -1: anywhere, as a
        kernel's violations have no iteration."""
        first = trial.verdict.first
        return first.iteration if first is not None and first.stage != "kernel" else -1

    def _shows_alone(self, trial: Trial) -> bool:
        alone = self._trials.look_alone(trial.case)
        return alone.signature == trial.signature and alike(alone.verdict, trial.verdict)

    def keep_in(self, folder: Path) -> None:
        """Write what was found, and its smallest case so far, into another folder than its own."""
        if self.first is None:
            return
        self._folder = folder
        (folder / "minimal").mkdir(parents=True, exist_ok=True)
        (folder / "found.json").write_text(pretty_case(self.first.case), encoding="utf-8")
        self._keep_smallest()

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
            trials.run,
            command=fuzz.plan.command,
            source=trials.host.source,
            seed=fuzz.plan.seed,
        )

    def conclude(self) -> Finding:
        """Confirm the smallest case in fresh forks."""
        assert self.first is not None
        assert self._smallest is not None
        self._keep_smallest()
        trials, smallest = self._trials, self._smallest
        case = msgspec.structs.replace(smallest.case, name=f"minimal-{self._folder.name}")
        engine = trials.host.engine(case, trials.run.patches, trials.run.kernels)
        outcome = confirm(
            engine,
            case,
            smallest.verdict,
            smallest.before,
            self._folder / "minimal",
            trials.run,
            again=shlex.join(["python", str(self._folder / "minimal" / SCRIPT)]),
            host=trials.host,
        )
        write_run(outcome)
        return Finding(
            signature=self._concluded(outcome),
            found=self.first.case,
            outcome=outcome,
            cases=int(self._cases),
            seconds=self._seconds,
            shrink_looks=self._looks,
            shrink_seconds=time.monotonic() - self._found_at,
            partial=self._partial,
        )

    def _concluded(self, outcome: Outcome) -> Signature:
        """What the smallest case shows in fresh forks; that is known from now on. If it is something else there than what was
        found, that is set aside."""
        assert self.first is not None
        assert self.first.signature is not None
        shown = signature_of(outcome.verdict, outcome.trace.header.ending)
        self._fuzz.known.add(self.first.signature)
        if outcome.verdict.first is None and outcome.trace.header.ending.kind == "finished":
            return self.first.signature  # a state leak, or nondeterministic: the trace of the run that showed it is gone
        if shown is None or shown == self.first.signature:
            return self.first.signature
        self._fuzz.set_aside(self.first)
        self._fuzz.known.add(shown)
        return shown


def _size(case: Case) -> tuple[int, bytes]:
    data = encode_case(case)
    return len(data), data
