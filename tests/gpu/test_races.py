"""Races between the streams of a GPU: pauses change no answer of the release, and show that a wait is missing."""

from functools import cache
from pathlib import Path

import pytest
from msgspec.structs import replace

from eagletwin.harness.testing.plugin import gpu_of_worker

from ..lab.gpu.compared import RACE
from ..lab.gpu.faults import WAITS, missing_waits, races
from ..lab.gpu.job import Job, JobResult
from ..lab.gpu.jobs import run_job


@cache
def _planted() -> dict[str, Job]:
    return {job.name: job for job in missing_waits(1)}


def _run(job: Job, folder: Path) -> JobResult:
    done = run_job(replace(job, mode=replace(job.mode, gpu=gpu_of_worker())), folder)
    assert not done.error
    return done


@pytest.mark.parametrize("group", [0, 1])
def test_the_release_answers_alike_whatever_is_delayed(tmp_path: Path, group: int) -> None:
    done = _run(races(2, 4, 1)[group], tmp_path)
    assert [one.status for one in done.seen] == ["equal"] * len(done.seen)
    runs = [run for one in done.seen for run in one.races]
    assert sum(len(run.pauses) for run in runs) > 20
    streams = {pause.place.rpartition(" on ")[2] for run in runs for pause in run.pauses}
    assert {"schedule", "forward", "copy"} <= streams


@pytest.mark.parametrize("name", [f"races/{word}/{patch.name}" for word in ("graphs", "eager") for patch in WAITS])
def test_a_missing_wait_is_found(tmp_path: Path, name: str) -> None:
    last = _run(_planted()[name], tmp_path).seen[-1]
    assert last.status == "diverged"
    assert last.rule == RACE
    race = last.races[-1]
    # A worker that died took its list of pauses with it; their seed is left.
    assert race.pauses or "killed" in race.differs
    assert f"seed {race.jitter.seed}" in last.where
