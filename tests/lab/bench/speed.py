"""The benchmark's cases, and how fast they are."""

import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

from msgspec.structs import replace

from eagletwin.harness.check.trials import Trials
from eagletwin.harness.core.case import Case, EngineSettings, Request, SGLangSettings
from eagletwin.harness.core.errors import HarnessError
from eagletwin.harness.core.files import RUN_MODULE
from eagletwin.harness.core.patch import Patch
from eagletwin.harness.core.run_spec import RunSpec
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.core.verdict import Verdict
from eagletwin.harness.engines.host import EngineProcess, Host
from eagletwin.harness.engines.source import INSTALLED, Source
from eagletwin.harness.families.dimensions.dimension import tokens
from eagletwin.harness.judge.judge import judge

from ..common import ROOT, module

# The benchmark's workload: plain cases of a stated size, the same for the same seed.


def sized_case(seed: int, *, batch: int, prompt: int, num_steps: int, topk: int = 1, max_new_tokens: int = 7) -> Case:
    """`batch` requests of `prompt` tokens each, all at once; 7 new tokens take about three rounds.

    A tree has as many nodes as its branches, each as long as num_steps, would have.
    """
    requests = tuple(
        Request(id=f"r{number}", prompt=tokens(seed * 64 + number, prompt, 96), max_new_tokens=max_new_tokens)
        for number in range(batch)
    )
    return _case(f"sized-{seed}", requests, num_steps, topk, topk * num_steps + 1)


def rate_case(seed: int, topk: int = 1, model: str = "llama-tiny") -> Case:
    """1-3 requests of 10-40 prompt tokens, about three rounds of three steps: what rates are stated for. A tree has 6 nodes.

    model: a recipe of 96 tokens or more
    """
    random = Random(seed)
    requests = tuple(
        Request(id=f"r{number}", prompt=tokens(random.randrange(1 << 30), random.randint(10, 40), 96), max_new_tokens=7)
        for number in range(random.randint(1, 3))
    )
    return replace(_case(f"rate-{seed}", requests, 3, topk, 6), model=model)


def _case(name: str, requests: tuple[Request, ...], num_steps: int, topk: int, num_draft_tokens: int) -> Case:
    return Case(
        name=name,
        model="llama-tiny",
        num_steps=num_steps,
        topk=topk,
        num_draft_tokens=num_draft_tokens if topk > 1 else 0,
        chunked_prefill_size=1024,
        requests=requests,
        engine=EngineSettings(sglang=SGLangSettings(max_total_tokens=4096, max_running_requests=16)),
    )


# What eagletwin costs: cases a second, how a case's time grows, how soon a bug is found. Printed, and written by `make bench`.
#
# Every figure that is compared with another comes from one process, its parts taken in turn: machines are noisy. Rates are of
# one core, to which the process and its engines are bound.


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


def rate(
    seconds: float,
    topk: int = 1,
    source: Source = INSTALLED,
    model: str = "llama-tiny",
    patches: tuple[Patch, ...] = (),
) -> Rate:
    """Run, trace and judge the workload for so long, as a search does; an engine stands before the clock starts."""
    with one_core(), Host(source=source) as host:
        trials = Trials(host, RunSpec(patches=patches))
        for seed in range(3):
            trials.look(rate_case(seed, topk, model))
        begun, seed = time.monotonic(), 3
        while time.monotonic() < begun + seconds:
            trial = trials.look(rate_case(seed, topk, model))
            refuse_wrong(trial.case, trial.verdict)
            seed += 1
        return Rate(seed - 3, time.monotonic() - begun)


def refuse_wrong(case: Case, verdict: Verdict) -> None:
    """Raises HarnessError for a case whose time says nothing."""
    if verdict.status != "equal" and not verdict.vacuous:
        raise HarnessError(
            f"{case.name} is {verdict.status}: {verdict.reason or verdict.first}",
            consequence="a rate of cases that are not equal says nothing",
            remedy="mend a live bug that every case of this model shows by --remedy; or see `eagletwin info doctor`",
        )


def parallel(seconds: float, rounds: int) -> tuple[Spread, Spread]:
    """Cases a second of one process alone, and of two at once together; in turn."""
    alone, together = [], []
    for _ in range(rounds):
        alone.append(sum(_rates(1, seconds)))
        together.append(sum(_rates(2, seconds)))
    return spread(alone), spread(together)


def _rates(processes: int, seconds: float) -> list[float]:
    """Each on a core of its own: the last line that each prints."""
    cores = sorted(os.sched_getaffinity(0))[-processes:]
    command = module("tests.lab", "rate", "--seconds", str(seconds))
    running = [
        subprocess.Popen(["taskset", "-c", str(core), *command], cwd=ROOT, stdout=subprocess.PIPE, text=True) for core in cores
    ]
    return [float(process.communicate()[0].split()[-2]) for process in running]


# An engine that runs cases and records nothing of them.
BARE = Patch(name="bare", switches=("record-nothing",))


@dataclass(frozen=True, slots=True)
class Share:
    """Seconds of a case: all of it, and the parts that are trace (taps, poison, writing, reading) and judge."""

    whole: float
    trace: float
    judge: float

    @property
    def engine(self) -> float:
        return self.whole - self.trace - self.judge


def share(cases: int, topk: int) -> Share:
    """What trace and judge cost: the same cases in turn on the engine as it is and on one that records nothing."""
    with one_core(), Host() as host:
        engines = Engines(host, topk, "llama-tiny")
        for seed in range(cases + 3):
            engines.run(seed, counted=seed >= 3)  # the first of each engine are slower
        return engines.share()


class Engines:
    """Two engines of a model, one that records nothing, and what the same cases took on them, run and judged."""

    def __init__(self, host: Host, topk: int, model: str, patches: tuple[Patch, ...] = ()) -> None:
        self._topk, self._model = topk, model
        self._full = host.engine(rate_case(0, topk, model), patches)
        self._bare = host.engine(rate_case(0, topk, model), (*patches, BARE))
        self.cases, self._whole, self._judged, self._plain = 0, 0.0, 0.0, 0.0

    def run(self, seed: int, *, counted: bool) -> None:
        """A case of the workload on both. Raises HarnessError if it is not equal."""
        case = rate_case(seed, self._topk, self._model)
        ran, judged, verdict = _timed(self._full, case)
        refuse_wrong(case, verdict)
        plain, _ = _ran(self._bare, case)
        if counted:
            self.cases, self._whole = self.cases + 1, self._whole + ran + judged
            self._judged, self._plain = self._judged + judged, self._plain + plain

    def share(self) -> Share:
        """Seconds a case, of those that count."""
        trace = self._whole - self._judged - self._plain
        return Share(self._whole / self.cases, trace / self.cases, self._judged / self.cases)


def in_turn(
    seconds: float, topk: int, model: str, beside: str, patches: tuple[Patch, ...] = (), source: Source = INSTALLED
) -> tuple[Share, Share]:
    """What a case takes of a model, with the patches, and of another one, case by case in turn in one process."""
    with one_core(), Host(source=source) as host:
        pair = Engines(host, topk, model, patches), Engines(host, topk, beside)
        begun, seed = time.monotonic(), 0
        while seed < 4 or time.monotonic() < begun + seconds:
            for engines in pair:
                engines.run(seed, counted=seed >= 3)
            seed += 1
        return pair[0].share(), pair[1].share()


def _ran(engine: EngineProcess, case: Case) -> tuple[float, Trace]:
    """Seconds to run the case and have its trace; the trace."""
    with tempfile.TemporaryDirectory(prefix="eagletwin-") as scratch:
        begun = time.monotonic()
        trace = engine.run(case, Path(scratch), fresh=False)
        return time.monotonic() - begun, trace


def _timed(engine: EngineProcess, case: Case) -> tuple[float, float, Verdict]:
    """Seconds to run the case and have its trace, and to judge it; the verdict."""
    ran, trace = _ran(engine, case)
    begun = time.monotonic()
    verdict = judge(trace)
    return ran, time.monotonic() - begun, verdict


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a decode step (draft, verify, draft extend) of up to two requests, by what executes its kernels; and how often
    the fast runtime is faster, which is a ratio of each case.
    """

    fast: Spread
    interpreter: Spread
    ratio: Spread


def step(cases: int, topk: int) -> StepTimes:
    """A decode step in the fast runtime and in Triton's interpreter, in turn, on engines that record nothing."""
    fast, stock = [], []
    with one_core(), Host() as host:
        for seed in range(cases):
            few, many = (sized_case(seed, batch=2, prompt=20, num_steps=3, topk=topk, max_new_tokens=new) for new in (4, 28))
            more = _steps(host.engine(few), many) - _steps(host.engine(few), few)
            quick, slow = host.engine(few, (BARE,)), host.engine(few, (BARE,), "interpreter")
            before = [_longer(quick, few, many) / more for _ in range(3)]
            stock.append(_longer(slow, few, many) / more)
            fast.append(statistics.median(before + [_longer(quick, few, many) / more for _ in range(3)]))
    return StepTimes(spread(fast), spread(stock), spread([long / short for long, short in zip(stock, fast, strict=True)]))


def _steps(engine: EngineProcess, case: Case) -> int:
    """The decode steps of a case, each of which verifies all requests of the batch."""
    return len({record.iteration for record in _ran(engine, case)[1].header.records if record.stage == "verify"})


def _longer(engine: EngineProcess, few: Case, many: Case) -> float:
    """Seconds that the case of more decode steps takes longer."""
    _ran(engine, few)  # the first case of an engine is slower
    (short, _), (long, _) = _ran(engine, few), _ran(engine, many)
    return long - short


def start(times: int) -> Spread:
    """Seconds from the shell to the verdict of `eagletwin check 25015`, with warm caches."""
    taken = []
    for number in range(times + 1):
        with tempfile.TemporaryDirectory(prefix="eagletwin-") as scratch:
            begun = time.monotonic()
            command = [*RUN_MODULE, "eagletwin", "check", "25015", "--out", scratch]
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
            if number:
                taken.append(time.monotonic() - begun)
    return spread(taken)


def build(times: int) -> Spread:
    """Seconds until an engine of another configuration stands, in a process that has imported SGLang."""
    taken = []
    with one_core(), Host() as host:
        for number in range(times + 1):
            begun = time.monotonic()
            host.engine(sized_case(0, batch=1, prompt=1, num_steps=1 + number))
            if number:
                taken.append(time.monotonic() - begun)
    return spread(taken)


# What grows -> (its values, the case of a value)
GROWTH: dict[str, tuple[tuple[int, ...], Callable[[int, int], Case]]] = {
    "batch size": ((1, 2, 4, 8, 16), lambda seed, n: sized_case(seed, batch=n, prompt=20, num_steps=3)),
    "prompt length": ((16, 64, 128, 256, 512), lambda seed, n: sized_case(seed, batch=1, prompt=n, num_steps=3)),
    "topk": ((1, 2, 4, 8, 16), lambda seed, n: sized_case(seed, batch=1, prompt=20, num_steps=3, topk=n)),
    "num_steps": ((1, 2, 4, 6, 8), lambda seed, n: sized_case(seed, batch=1, prompt=20, num_steps=n)),
}


def growth(rounds: int) -> dict[str, dict[int, Spread]]:
    """Seconds of a case (run, trace, judge) by its size; sizes in turn, so that a slow moment falls on all of them."""
    with one_core(), Host() as host:
        found: dict[str, dict[int, Spread]] = {}
        for name, (values, case_of) in GROWTH.items():
            taken: dict[int, list[float]] = {value: [] for value in values}
            for number in range(rounds + 1):
                for value in values:
                    case = case_of(number, value)
                    seconds = sum(_timed(host.engine(case), case)[:2])
                    if number:
                        taken[value].append(seconds)
            found[name] = {value: spread(seconds) for value, seconds in taken.items()}
        return found
