"""What eagletwin costs: cases a second, how a case's time grows, how soon a bug is found. Printed, and written by `make bench`.

Every figure that is compared with another comes from one process, its parts taken in turn: machines are noisy. Rates are of
one core, to which the process and its engines are bound.
"""

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from eagletwin.cases.workload import rate_case

from .engines.process import Host
from .patch import Edit, Patch
from .trial import Trials

_TAPS, _DRIVE = "eagletwin.harness.engines.sglang.taps.Taps", "eagletwin.harness.engines.sglang.drive.Drive"


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, and the lowest and highest of n measurements."""

    median: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.low:.3g}-{self.high:.3g})"


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values), len(values))


@contextmanager
def one_core() -> Iterator[None]:
    """Bind this process, and what it starts, to one core."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@dataclass(frozen=True, slots=True)
class Rate:
    """cases run, traced and judged in `seconds`, on one core."""

    cases: int
    seconds: float

    @property
    def per_second(self) -> float:
        return self.cases / self.seconds


def rate(seconds: float) -> Rate:
    """Run, trace and judge the workload for so long, as a search does; an engine stands before the clock starts."""
    with one_core(), Host() as host:
        trials = Trials(host)
        for seed in range(3):
            trials.look(rate_case(seed))
        begun, seed = time.monotonic(), 3
        while time.monotonic() < begun + seconds:
            trial = trials.look(rate_case(seed))
            if trial.kind:
                raise AssertionError(f"{trial.case.name}: {trial.verdict}")
            seed += 1
        return Rate(seed - 3, time.monotonic() - begun)


# An engine that runs the same cases and records nothing: what a case costs without its trace and its judge.
BARE = Patch(
    name="bare",
    edits=(Edit(target="eagletwin.harness.trace.Recorder.add", match='"""', replacement='return\n"""'),),
)
