"""The CUDA engine: what a graph hides from the taps shows, a case leaves nothing behind, and a missing wait is found."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from msgspec.structs import replace

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.run_spec import Limits, Mode
from eagletwin.harness.engines.host import Host
from eagletwin.harness.engines.machine import missing_for_cuda
from eagletwin.harness.judge.judge import judge
from eagletwin.harness.judge.trace_diff import diff
from eagletwin.harness.testing.plugin import gpu_of_worker

from ..engine.test_dp_attention import CASE as TWO_RANKS
from ..engine.test_dp_attention import FAULTS, remedies_of
from ..lab.bench.speed import rate_case
from ..lab.gpu.compared import RACE
from ..lab.gpu.faults import STATES_OF_NO_RUN, WAITS, batch_of, missing_waits, races
from ..lab.gpu.job import Job, JobResult
from ..lab.gpu.jobs import run_job

# The CUDA engine: what a graph hides from the taps still shows, and a case leaves nothing behind for the next.

# Dies in the middle of a draft, of an index far outside its tensor, if the case says so.
_OUTSIDE = Patch(
    name="index-outside",
    edits=(
        Edit(
            target="sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.draft",
            match="draft_input: EagleDraftInput = batch.spec_info",
            replacement="""draft_input: EagleDraftInput = batch.spec_info
if len(batch.reqs) == 3:
    torch.zeros(1, device="cuda")[torch.full((1,), 1 << 40, device="cuda")].cpu()""",
        ),
    ),
)

_IF_FOUR = Patch(
    name="if-four",
    edits=(
        Edit(
            target="sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.draft_forward",
            match="out_cache_loc = per_step_draft_out_cache_loc(",
            replacement="""if forward_batch.batch_size == 4:
    self.seen_four = True
out_cache_loc = per_step_draft_out_cache_loc(""",
        ),
    ),
)


@pytest.fixture
def host() -> Iterator[Host]:
    with Host(mode=Mode(device="cuda", graphs=(1, 2, 4), overlap=True, gpu=gpu_of_worker())) as host:
        yield host


@pytest.mark.parametrize(("name", "rule"), [("25015", "draft.scratch_kv"), ("26329", "draft.input_ids")])
def test_an_undone_fix_shows_with_graphs(host: Host, tmp_path: Path, name: str, rule: str) -> None:
    entry = LEDGER[name]
    for number, (side, status) in enumerate(((entry.green, "equal"), (entry.red, "diverged"))):
        folder = tmp_path / str(number)
        folder.mkdir()
        verdict = judge(host.engine(entry.case, side.patches).run(entry.case, folder))
        assert verdict.status == status
    assert verdict.rule == rule
    assert name != "25015" or verdict.unseen["draft.positions"] > 0  # the positions themselves were in the graph


@pytest.mark.parametrize("topk", [1, 3])
def test_a_case_after_others_leaves_the_trace_of_a_fresh_process(host: Host, tmp_path: Path, topk: int) -> None:
    traces = []
    for number in (0, 1, 2, 0):
        folder = tmp_path / str(len(traces))
        folder.mkdir()
        case = rate_case(number, topk)
        traces.append(host.engine(case).run(case, folder))
    compared = diff(traces[0], traces[-1])
    assert compared.compared > 100
    assert compared.differences == []


def test_a_worker_that_dies_costs_one_case(host: Host, tmp_path: Path) -> None:
    cases = [next(case for case in map(rate_case, range(99)) if len(case.requests) == count) for count in (2, 3, 1)]
    verdicts = []
    for number, case in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        verdicts.append(judge(host.engine(case, (_OUTSIDE,)).run(case, folder)))
    assert [verdict.status for verdict in verdicts] == ["equal", "unknown", "equal"]
    assert verdicts[1].rule == "engine.crash"


def test_states_of_a_graph_that_did_not_run_are_found(host: Host, tmp_path: Path) -> None:
    # graphs are for up to 4, and nothing of the fault runs in one
    for size, status, rule in ((2, "unknown", ""), (5, "diverged", "draft.hidden_in")):
        folder = tmp_path / str(size)
        folder.mkdir()
        case = batch_of(size, "llama-mtp-chain")
        verdict = judge(host.engine(case, (STATES_OF_NO_RUN,)).run(case, folder))
        assert (verdict.status, verdict.rule, verdict.vacuous) == (status, rule, size == 2), verdict


def test_a_changed_statement_in_the_graph_of_another_batch_did_not_run(host: Host, tmp_path: Path) -> None:
    for size, executed in ((2, 1), (4, 2), (1, 1)):  # the condition, and what it guards
        folder = tmp_path / str(size)
        folder.mkdir()
        case = batch_of(size, "llama-tiny")
        (patched,) = host.engine(case, (_IF_FOUR,)).run(case, folder).header.patched or ()
        assert (len(patched.executed), len(patched.places)) == (executed, 2)


# Races between the streams of a GPU: pauses change no answer of the release, and show that a wait is missing.


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


ON_RANK_1 = "torch.distributed.get_rank() == 1"
# Rank 1 writes its KV rows to the slots before their own; a graph captures that too.
_WRONG_SLOT = Patch(
    name="wrong-slot",
    edits=(
        Edit(
            target="sglang.srt.mem_cache.memory_pool.MHATokenToKVPool.set_kv_buffer",
            match="loc, _, _ = unwrap_write_loc(loc_info)",
            replacement=f"""loc, _, _ = unwrap_write_loc(loc_info)
if {ON_RANK_1}:
    loc = torch.where(loc > 1, loc - 1, loc)""",
        ),
    ),
)
# Rank 1 dies in the middle of a draft, while rank 0 goes on into a collective.
_DIES = Patch(
    name="dies",
    edits=(
        Edit(
            target="sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.draft",
            match="draft_input: EagleDraftInput = batch.spec_info",
            replacement=f"""draft_input: EagleDraftInput = batch.spec_info
if len(batch.reqs) == 3 and {ON_RANK_1}:
    import os
    os.kill(os.getpid(), 9)""",
        ),
    ),
)


def _need_two_gpus() -> None:
    missing = missing_for_cuda(2)
    if missing is not None:
        pytest.skip(f"{missing[0]}: {missing[1]}")


@pytest.fixture(scope="module")
def ranks_host() -> Iterator[Host]:
    _need_two_gpus()
    with Host(mode=Mode(device="cuda", graphs=(1, 2, 4), overlap=True, tp=2)) as ranks_host:
        yield ranks_host


def test_every_rank_is_judged_and_an_undone_fix_shows_on_both(ranks_host: Host, tmp_path: Path) -> None:
    entry = LEDGER["25015"]
    for side, status in ((entry.green, "equal"), (entry.red, "diverged")):
        folder = tmp_path / status
        folder.mkdir()
        trace = ranks_host.engine(entry.case, side.patches).run(entry.case, folder)
        verdict = judge(trace)
        assert verdict.status == status, verdict
        assert [one.header.engine.rank for one in trace.ranks] == [0, 1]
        assert verdict.checked["ranks.agree"] > 0
    assert verdict.rule == "draft.scratch_kv"


def test_a_wrong_slot_on_one_rank_is_found_and_named(ranks_host: Host, tmp_path: Path) -> None:
    case = rate_case(0, 3)
    verdict = judge(ranks_host.engine(case, (_WRONG_SLOT,)).run(case, tmp_path))
    assert verdict.first is not None
    assert (verdict.status, verdict.rule, verdict.first.rank) == ("diverged", "target.kv", 1), verdict


def test_a_rank_that_dies_costs_one_case(ranks_host: Host, tmp_path: Path) -> None:
    cases = [next(case for case in map(rate_case, range(99)) if len(case.requests) == count) for count in (2, 3, 2)]
    traces = []
    for number, case in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        traces.append(ranks_host.engine(case, (_DIES,)).run(case, folder, Limits(step=60.0)))
    verdicts = [judge(trace) for trace in traces]
    assert [verdict.status for verdict in verdicts] == ["equal", "unknown", "equal"]
    assert verdicts[1].rule == "engine.crash"
    assert verdicts[1].reason.startswith("rank 1: killed by SIGKILL")
    assert diff(traces[0], traces[2]).same  # other processes add up in another order, if at all


# Ranks of DP attention, which NCCL connects: with graphs as released, without them with what mends the ledger's bugs.


@pytest.mark.parametrize("graphs", [(1, 2, 4), ()])
def test_ranks_of_dp_attention_are_equal(tmp_path: Path, graphs: tuple[int, ...]) -> None:
    _need_two_gpus()
    with Host(mode=Mode(device="cuda", graphs=graphs, overlap=bool(graphs))) as host:
        trace = host.engine(TWO_RANKS, () if graphs else remedies_of(TWO_RANKS.model)).run(TWO_RANKS, tmp_path)
    verdict = judge(trace)
    assert verdict.status == "equal", verdict
    assert [one.header.engine.rank for one in trace.ranks] == [0, 1]
    assert {"ranks.gathered", "ranks.idle"} <= {*verdict.checked}


def test_faults_of_a_rank_of_dp_attention_are_found_and_named(tmp_path: Path) -> None:
    _need_two_gpus()
    with Host(mode=Mode(device="cuda")) as host:
        for fault in ("an idle rank writes a row of its draft", "padding is counted", "a rank takes the rows of the first"):
            target, match, replacement, named = FAULTS[fault]
            planted = Patch(name="planted", edits=(Edit(target=target, match=match, replacement=replacement),))
            folder = tmp_path / str(len([*tmp_path.iterdir()]))
            folder.mkdir()
            verdict = judge(
                host.engine(TWO_RANKS, (*remedies_of(TWO_RANKS.model), planted)).run(TWO_RANKS, folder, Limits(step=60.0))
            )
            assert verdict.first is not None, (fault, verdict)
            assert (verdict.status, verdict.rule, verdict.first.rank) == ("diverged", *named), (fault, verdict)
