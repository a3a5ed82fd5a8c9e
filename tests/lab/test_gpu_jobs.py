"""Jobs for a GPU host: processes that end with a campaign, engines that share a GPU, exit codes, and types compared."""

import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch

from eagletwin.harness.core.case import Case, Request
from eagletwin.harness.core.records import Ending, EngineInfo
from eagletwin.harness.core.run_spec import CPU, Mode
from eagletwin.harness.core.trace import Recorder, Trace, new_header
from eagletwin.harness.families.weights import model_pair

from .gpu import jobs
from .gpu.compared import BIN, Apart, apart
from .gpu.job import Beside, CaseResult, Job, JobResult, MustShow
from .gpu.jobs import may_share, run_plan
from .gpu.processes import CONTROL, Processes, Sharing
from .gpu.summary import CampaignSummary, comparisons, exit_code, proofs, statuses_of

# How far apart two types are: rows and choices are compared where both engines had seen the same tokens, and nowhere else.


DIGEST = model_pair("llama-tiny").digest


def trace(next_token: int, off: float, predicted: list[int]) -> Trace:
    """A prompt of two tokens, a round, and rows that are off by so much: the draft's by 100 where another token followed."""
    case = Case(name="apart", model="llama-tiny", num_steps=1, requests=(Request(id="a", prompt=(1, 2), max_new_tokens=4),))
    recorder, wide = Recorder(), 0.0 if next_token == 5 else 100.0

    def kv(rows: list[int], part: str, off: float) -> dict[str, torch.Tensor]:
        return {f"{part}_rows": torch.tensor(rows), f"{part}_kv": torch.ones(len(rows), 2, 1, 1, 2) + off}

    recorder.add(
        "a",
        0,
        "prefill",
        numbers={"start": 0, "end": 2, "final": 1},
        tensors={
            **kv([0, 1], "target", off),
            **kv([0, 1], "draft", off + wide),
            "next_token": torch.tensor([next_token]),
            "proposal": torch.tensor([7]),
            "proposal_hidden": torch.ones(3) + off + wide,
        },
    )
    recorder.add("a", 0, "verify", numbers={"accept_len": len(predicted)}, tensors={"predicted": torch.tensor(predicted)})
    recorder.add("a", 0, "extend", tensors={**kv([2], "target", off), **kv([2], "draft", off), "proposal": torch.tensor([8])})
    recorder.add("a", 0, "finished", tensors={"tokens": torch.tensor([next_token, *predicted])})
    engine = EngineInfo(name="none", version="0", device="cpu", kernels="none", torch="0", triton="0")
    return Trace(
        new_header(case, DIGEST, engine, Ending(kind="finished"), recorder.records),
        dict(recorder.tensors),
    )


def test_rows_are_compared_as_long_as_the_tokens_are_the_same() -> None:
    found = apart(trace(5, 16 * BIN, [6, 9]), trace(5, 0.0, [6, 9]))
    assert {kind: sum(rows.bins.values()) for kind, rows in found.rows.items()} == {
        "target.kv": 3,
        "draft.kv": 3,
        "draft.hidden": 1,
    }
    assert all(rows.largest == 16 * BIN for rows in found.rows.values())
    assert found.rows["target.kv"].quantile(0.5) == 16.5 * BIN
    assert (found.decided, found.proposed, found.requests, found.tokens) == ((2, 0), (2, 0), (1, 0), (3, 3))
    assert (found.rounds, found.accepted) == ((1, 1), (2, 2))


def test_behind_another_token_only_what_came_before_it_is() -> None:
    found = apart(trace(5, BIN, [6, 9]), trace(4, 0.0, [6]))
    assert {kind: sum(rows.bins.values()) for kind, rows in found.rows.items()} == {"target.kv": 2}
    assert (found.decided, found.proposed) == ((1, 1), (0, 0))
    assert (found.requests, found.tokens, found.accepted) == ((1, 1), (2, 0), (2, 1))


def test_sums_are_of_all_cases() -> None:
    one = apart(trace(5, BIN, [6, 9]), trace(5, 0.0, [6, 9]))
    other = apart(trace(5, 4 * BIN, [6]), trace(5, 0.0, [7]))
    total = one + other + Apart()
    assert total.rows["target.kv"].bins == {1: 3, 4: 2}
    assert total.rows["target.kv"].largest == 4 * BIN
    assert (total.decided, total.rounds) == ((4, 1), (2, 2))


# Which results of a campaign's jobs end in which exit code of `gpu run`: each comparison that was asked for counts.


SAME = Beside(same=True, compared=9, largest=0.0)
EQUAL, KNOWN, WRONG = (
    CaseResult(case="x", status=status, known=known)
    for status, known in (("equal", ""), ("diverged", "33758"), ("diverged", ""))
)


def red(rule: str, broken: str, unseen: dict[str, int] | None = None, hidden: str = "") -> JobResult:
    """The red side of an entry of this rule, on which this one broke."""
    seen = CaseResult(case="x", status="diverged", rule=broken, unseen=unseen or {})
    return JobResult(name="x", mode=CPU, seen=(seen,), expected=MustShow(rule=rule, hidden=hidden))


JOBS: dict[str, tuple[JobResult, int]] = {
    "all the same": (JobResult(name="x", mode=CPU, seen=(EQUAL,), again=True, again_compared=9, beside=SAME), 0),
    "a known bug": (JobResult(name="x", mode=CPU, seen=(KNOWN,)), 0),
    "a divergence": (JobResult(name="x", mode=CPU, seen=(EQUAL, WRONG)), 1),
    "a job that did not run": (JobResult(name="x", mode=CPU, error="it fell"), 125),
    "another trace after the others": (JobResult(name="x", mode=CPU, seen=(EQUAL,), again=False, again_compared=9), 125),
    "nothing compared after the others": (JobResult(name="x", mode=CPU, seen=(EQUAL,), again=True), 125),
    "another number on the other engine": (
        JobResult(name="x", mode=CPU, seen=(EQUAL,), beside=Beside(same=False, compared=9, largest=0.1, differs="draft")),
        1,
    ),
    "a crash on the other engine": (
        JobResult(name="x", mode=CPU, seen=(EQUAL,), beside=Beside(same=True, compared=9, largest=0.0, unfinished="crashed")),
        125,
    ),
    "nothing compared on the other engine": (
        JobResult(name="x", mode=CPU, seen=(EQUAL,), beside=Beside(same=True, compared=0, largest=0.0)),
        125,
    ),
    "nothing at all": (JobResult(name="x", mode=CPU), 125),
    "a bug that is found": (red("draft.kv", "draft.kv"), 0),
    "any rule of a planted fault": (red("", "draft.kv"), 0),
    "a bug that shows in what a graph left": (red("draft.positions", "draft.scratch_kv", {"draft.positions": 3}), 0),
    "the same where nothing was hidden": (red("draft.positions", "draft.scratch_kv"), 125),
    "a bug by another rule": (red("draft.kv", "draft.mask"), 125),
    "a bug that is not found": (JobResult(name="x", mode=CPU, seen=(EQUAL,), expected=MustShow(rule="draft.kv")), 125),
    "a worker that dies of its bug": (
        JobResult(
            name="x",
            mode=CPU,
            seen=(CaseResult(case="x", status="unknown", rule="engine.crash"),),
            expected=MustShow(rule="engine.crash"),
        ),
        0,
    ),
    "a bug that did not run": (JobResult(name="x", mode=CPU, error="it fell", expected=MustShow(rule="draft.kv")), 125),
    "a bug that shows where it should be hidden": (red("draft.kv", "draft.kv", hidden="a graph"), 125),
}

# Of these alone nothing has a verdict that is a proof's: the mode hides the bug.
HIDDEN = JobResult(name="x", mode=CPU, seen=(EQUAL,), expected=MustShow(rule="draft.kv", hidden="a graph"))


@pytest.mark.parametrize("what", JOBS)
def test_every_comparison_of_a_campaign_counts(what: str) -> None:
    done, code = JOBS[what]
    assert exit_code(statuses_of(done)) == code
    assert any("DIFFERENT" in text or "UNKNOWN" in text for text in comparisons(done)) == (
        code != 0 and bool(done.beside or done.again is not None)
    )


def test_a_bug_that_its_mode_hides_is_neither_found_nor_missed() -> None:
    assert statuses_of(HIDDEN) == {"hidden": 1}
    green = JobResult(name="x", mode=CPU, seen=(EQUAL,))
    assert exit_code(statuses_of(HIDDEN) + statuses_of(green)) == 0


def test_the_sides_of_an_entry_make_a_line() -> None:
    def side(name: str, of: JobResult) -> JobResult:
        return msgspec.structs.replace(of, name=name)

    green = JobResult(name="x", mode=CPU, seen=(EQUAL,))
    broken = JobResult(name="x", mode=CPU, seen=(CaseResult(case="x", status="diverged", rule="draft.mask"),))
    lines = list(
        proofs(
            [
                side("25015/graphs/red", red("draft.positions", "draft.scratch_kv", {"draft.positions": 3})),
                side("25015/graphs/green", green),
                side("8409/eager/green", green),
                side("8409/eager/red", red("draft.kv", "draft.kv")),
                side("8409/graphs/green", broken),
                side("8409/graphs/red", red("draft.kv", "draft.kv")),
                side("chain-hidden/graphs/green", green),
                side("chain-hidden/graphs/red", HIDDEN),
                side("small-tree/eager/green", green),
                side("small-tree/graphs/green", green),
                side("small-tree/graphs/red", JobResult(name="x", mode=CPU, seen=(EQUAL,), expected=MustShow(rule="a"))),
                green,
            ]
        )
    )
    assert lines == [
        "25015 graphs: proven by draft.scratch_kv",
        "8409 eager: proven",
        "8409 graphs: GREEN IS diverged draft.mask",
        "chain-hidden graphs: hidden: a graph",
        "small-tree eager: only one side was run",
        "small-tree graphs: red is NOT FOUND: equal",
    ]


# A campaign that is interrupted ends its jobs, and starts none of those that wait.


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


# Engines that use a GPU at the same time: which do, and that none of them pays for what another one did.


GPU = Mode(device="cuda", graphs=(1,))
SHARING_EQUAL = CaseResult(case="c", status="equal")
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
        return first(job.name) if shared else JobResult(name=job.name, mode=job.mode, seen=(SHARING_EQUAL,))

    monkeypatch.setattr(jobs, "_apart", apart)
    sharing = Sharing(wanted=True)
    sharing.environment = {"CUDA_MPS_PIPE_DIRECTORY": "here"}
    return list(run_plan(plan, out, processes=1, sharing=sharing)), calls


PLAN = [Job(name="fault", mode=GPU, cases=(), expected=MustShow()), *(Job(name=f"{n}", mode=GPU, cases=()) for n in range(3))]


@pytest.mark.parametrize("ended", [(SHARING_EQUAL, CRASHED), (UNJUDGED,), ()], ids=["crashed", "unknown", "no case"])
def test_a_job_in_which_a_worker_died_runs_again_alone_and_counts_once(
    ended: tuple[CaseResult, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first(name: str) -> JobResult:
        died = name == "1"
        return JobResult(
            name=name, mode=GPU, seen=ended if died else (SHARING_EQUAL,), error="" if ended or not died else "it fell"
        )

    done, calls = ran(PLAN, first, tmp_path / "out", monkeypatch)
    assert [call[:2] for call in calls] == [("0", True), ("1", True), ("2", True), ("fault", False), ("1", False)]
    assert len({folder for _, _, folder in calls}) == len(calls)
    assert {one.name: (one.shared, one.seen) for one in done} == {
        **dict.fromkeys(("0", "2"), (True, (SHARING_EQUAL,))),
        **dict.fromkeys(("1", "fault"), (False, (SHARING_EQUAL,))),
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
        summary.add(JobResult(name="x", mode=GPU, seen=(SHARING_EQUAL,), shared=shared))
    assert "2 of 3 jobs used a GPU at the same time as others (MPS)\n" in summary.text(1.0, tmp_path, None)
    assert "(MPS): --no-mps\n" in summary.text(1.0, tmp_path, None, "--no-mps")
    on_cpu = CampaignSummary()
    on_cpu.add(JobResult(name="x", mode=CPU, seen=(SHARING_EQUAL,)))
    assert "MPS" not in on_cpu.text(1.0, tmp_path, None)
