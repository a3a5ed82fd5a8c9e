"""Tensor parallelism 2 on two GPUs, through NCCL: every rank is judged, a fault of one is named, and none waits for ever."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.run_spec import Limits, Mode
from eagletwin.harness.engines.host import Host
from eagletwin.harness.engines.machine import missing_for_cuda
from eagletwin.harness.judge.judge import judge
from eagletwin.harness.judge.trace_diff import diff

from ..lab.bench.speed import rate_case

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


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    missing = missing_for_cuda(2)
    if missing is not None:
        pytest.skip(f"{missing[0]}: {missing[1]}")
    with Host(mode=Mode(device="cuda", graphs=(1, 2, 4), overlap=True, tp=2)) as host:
        yield host


def test_every_rank_is_judged_and_an_undone_fix_shows_on_both(host: Host, tmp_path: Path) -> None:
    entry = LEDGER["25015"]
    for side, status in ((entry.green, "equal"), (entry.red, "diverged")):
        folder = tmp_path / status
        folder.mkdir()
        trace = host.engine(entry.case, side.patches).run(entry.case, folder)
        verdict = judge(trace)
        assert verdict.status == status, verdict
        assert [one.header.engine.rank for one in trace.ranks] == [0, 1]
        assert verdict.checked["ranks.agree"] > 0
    assert verdict.rule == "draft.scratch_kv"


def test_a_wrong_slot_on_one_rank_is_found_and_named(host: Host, tmp_path: Path) -> None:
    case = rate_case(0, 3)
    verdict = judge(host.engine(case, (_WRONG_SLOT,)).run(case, tmp_path))
    assert verdict.first is not None
    assert (verdict.status, verdict.rule, verdict.first.rank) == ("diverged", "target.kv", 1), verdict


def test_a_rank_that_dies_costs_one_case(host: Host, tmp_path: Path) -> None:
    cases = [next(case for case in map(rate_case, range(99)) if len(case.requests) == count) for count in (2, 3, 2)]
    traces = []
    for number, case in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        traces.append(host.engine(case, (_DIES,)).run(case, folder, Limits(step=60.0)))
    verdicts = [judge(trace) for trace in traces]
    assert [verdict.status for verdict in verdicts] == ["equal", "unknown", "equal"]
    assert verdicts[1].rule == "engine.crash"
    assert verdicts[1].reason.startswith("rank 1: killed by SIGKILL")
    assert diff(traces[0], traces[2]).same  # other processes add up in another order, if at all
