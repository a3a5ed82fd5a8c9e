"""Engines that use a GPU at the same time: which do, and that none of them pays for what another one did."""

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from eagletwin.harness.core.run_spec import CPU, Mode

from .gpu import jobs
from .gpu.job import CaseResult, Job, JobResult, MustShow
from .gpu.jobs import may_share, run_plan
from .gpu.processes import Processes
from .gpu.sharing import CONTROL, Sharing
from .gpu.summary import CampaignSummary

GPU = Mode(device="cuda", graphs=(1,))
EQUAL = CaseResult(case="c", status="equal")
CRASHED = CaseResult(case="c", status="diverged", rule="engine.crash")
UNJUDGED = CaseResult(case="c", status="unknown", reason="it hung")


def daemon(folder: Path, monkeypatch: pytest.MonkeyPatch, ends_with: int = 0) -> Path:
    """Put a program in the place of NVIDIA's; it notes its arguments, what it is told, and where its pipes are."""
    notes, program = folder / "notes", folder / CONTROL
    program.write_text(
        f'#!/bin/sh\necho "$* $(cat) $CUDA_MPS_PIPE_DIRECTORY $CUDA_MPS_LOG_DIRECTORY" >> {notes}\nexit {ends_with}\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return notes


def test_the_daemon_runs_as_long_as_the_block_and_has_folders_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = daemon(tmp_path, monkeypatch)
    with Sharing(wanted=True) as sharing:
        assert sharing.why_not == ""
        place = sharing.environment["CUDA_MPS_PIPE_DIRECTORY"]
        assert Path(place).is_dir()
        assert notes.read_text().split() == ["-d", place, place]
    assert notes.read_text().splitlines()[1].split() == ["quit", place, place]
    assert not Path(place).exists()


def test_engines_take_turns_where_there_is_no_daemon_and_the_reason_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with Sharing(wanted=True) as absent:
        assert (absent.environment, absent.why_not) == ({}, f"{CONTROL} is not on the path")
    notes = daemon(tmp_path, monkeypatch, ends_with=1)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with Sharing(wanted=True) as refused:
        assert (refused.environment, refused.why_not) == ({}, f"{CONTROL} ended with 1")
    assert len(notes.read_text().splitlines()) == 1
    with Sharing(wanted=False) as unwanted:
        assert (unwanted.environment, unwanted.why_not) == ({}, "--no-mps")
    assert len(notes.read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("job", "may"),
    [
        (Job(name="generated", mode=GPU, cases=()), True),
        (Job(name="planted", mode=GPU, cases=(), expected=MustShow()), False),
        (Job(name="raced", mode=GPU, cases=(), races=2), False),
        (Job(name="ranks", mode=msgspec.structs.replace(GPU, tp=2), cases=()), False),
        (Job(name="cpu", mode=CPU, cases=()), False),
    ],
    ids=lambda value: value.name if isinstance(value, Job) else "",
)
def test_what_must_fail_or_is_about_time_has_the_gpu_alone(job: Job, may: bool) -> None:
    assert may_share(job) is may


def ran(
    plan: list[Job], first: Callable[[str], JobResult], out: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[JobResult], list[tuple[str, bool, str]]]:
    """Run a plan with a daemon that is up. Of each job that ran: its name, whether it shared, its folder. first: the result
    of one that shares; alone all is equal."""
    calls = list[tuple[str, bool, str]]()

    def apart(job: Job, folder: Path, environment: dict[str, str], _: Processes) -> JobResult:
        shared = environment.get("CUDA_MPS_PIPE_DIRECTORY") == "here"
        calls.append((job.name, shared, folder.name))
        return first(job.name) if shared else JobResult(name=job.name, mode=job.mode, seen=(EQUAL,))

    monkeypatch.setattr(jobs, "_apart", apart)
    sharing = Sharing(wanted=True)
    sharing.environment = {"CUDA_MPS_PIPE_DIRECTORY": "here"}
    return list(run_plan(plan, out, processes=1, sharing=sharing)), calls


PLAN = [Job(name="fault", mode=GPU, cases=(), expected=MustShow()), *(Job(name=f"{n}", mode=GPU, cases=()) for n in range(3))]


@pytest.mark.parametrize("ended", [(EQUAL, CRASHED), (UNJUDGED,), ()], ids=["crashed", "unknown", "no case"])
def test_a_job_in_which_a_worker_died_runs_again_alone_and_counts_once(
    ended: tuple[CaseResult, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first(name: str) -> JobResult:
        died = name == "1"
        return JobResult(name=name, mode=GPU, seen=ended if died else (EQUAL,), error="" if ended or not died else "it fell")

    done, calls = ran(PLAN, first, tmp_path / "out", monkeypatch)
    assert [call[:2] for call in calls] == [("0", True), ("1", True), ("2", True), ("fault", False), ("1", False)]
    assert len({folder for _, _, folder in calls}) == len(calls)
    assert {one.name: (one.shared, one.seen) for one in done} == {
        **dict.fromkeys(("0", "2"), (True, (EQUAL,))),
        **dict.fromkeys(("1", "fault"), (False, (EQUAL,))),
    }
    written = (tmp_path / "out" / jobs.RESULTS).read_bytes().splitlines()
    assert sorted(msgspec.json.decode(line, type=JobResult).name for line in written) == ["0", "1", "2", "fault"]


def test_a_divergence_is_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = CaseResult(case="c", status="diverged", rule="draft.kv")
    done, calls = ran(PLAN[1:], lambda name: JobResult(name=name, mode=GPU, seen=(wrong,)), tmp_path / "out", monkeypatch)
    assert len(calls) == 3
    assert all(one.shared and one.seen == (wrong,) for one in done)


def test_the_end_of_a_run_says_how_many_shared_or_why_none_did(tmp_path: Path) -> None:
    summary = CampaignSummary()
    for shared in (True, True, False):
        summary.add(JobResult(name="x", mode=GPU, seen=(EQUAL,), shared=shared))
    assert "2 of 3 jobs used a GPU at the same time as others (MPS)\n" in summary.text(1.0, tmp_path, None)
    assert "(MPS): --no-mps\n" in summary.text(1.0, tmp_path, None, "--no-mps")
    on_cpu = CampaignSummary()
    on_cpu.add(JobResult(name="x", mode=CPU, seen=(EQUAL,)))
    assert "MPS" not in on_cpu.text(1.0, tmp_path, None)
