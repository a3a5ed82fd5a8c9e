"""A campaign that is interrupted ends its jobs, and starts none of those that wait."""

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from eagletwin.harness.core.mode import CPU

from .gpu import jobs
from .gpu.job import Job, JobResult
from .gpu.jobs import run_plan
from .gpu.processes import Processes

# Where the tests run in the background of a shell, it hands on "ignore SIGINT".
SLEEPS = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGINT, signal.SIG_DFL); print('up', flush=True); time.sleep(600)",
]


def test_processes_end_with_the_block_and_no_other_one_starts(tmp_path: Path) -> None:
    begun = time.monotonic()
    with ThreadPoolExecutor(2) as pool, (tmp_path / "log").open("wb") as log:
        with Processes() as started:
            runs = pool.submit(started.run, SLEEPS, {}, log)
            while not (tmp_path / "log").read_bytes():
                time.sleep(0.01)
        assert runs.result() != 0
        assert started.run([sys.executable, "-c", "print('another')"], {}, log) != 0
    assert b"another" not in (tmp_path / "log").read_bytes()
    assert time.monotonic() - begun < 300


def test_a_plan_that_nobody_reads_on_runs_no_further_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran, second = list[str](), threading.Event()

    def apart(job: Job, _: Path, environment: dict[str, str], started: Processes) -> JobResult:
        ran.append(job.name)
        if job.name == "1":
            second.set()
            with (tmp_path / "log").open("wb") as log:
                started.run(SLEEPS, environment, log)
        return JobResult(name=job.name, mode=job.mode)

    monkeypatch.setattr(jobs, "_apart", apart)
    results = run_plan([Job(name=str(number), mode=CPU, cases=()) for number in range(9)], tmp_path / "out", processes=1)
    assert next(results).name == "0"
    assert second.wait(60)
    results.close()
    assert ran == ["0", "1"]
    assert len((tmp_path / "out" / jobs.RESULTS).read_bytes().splitlines()) == 1
