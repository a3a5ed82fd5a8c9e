"""Tensor parallelism 2 on a CPU (gloo, a process a rank): each rank is judged, a fault of one is named, none waits for ever."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from eagletwin.harness.check.argument import argue
from eagletwin.harness.core.case import Case, EngineSettings, WeightPath
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.run_spec import Limits, Mode
from eagletwin.harness.core.trace import Trace, rank_folder
from eagletwin.harness.engines.host import Host, WouldNotStart
from eagletwin.harness.families.valid import read_trace
from eagletwin.harness.judge.judge import judge
from eagletwin.harness.judge.trace_diff import diff

from ..rows import long, spread
from .changes import bump, changed, every, last_of, nudge, without
from .test_crash_and_hang import VERIFY
from .test_plain_decode import CASE as PLAIN_DECODE
from .test_weight_updates import by

ON_RANK_1 = "torch.distributed.get_rank() == 1"
# What goes wrong on rank 1 alone, and the rule that must name it.
FAULTS = {
    "its rows go to the slot before their own": (
        "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool.set_kv_buffer",
        "loc, _, _ = unwrap_write_loc(loc_info)",
        f"loc, _, _ = unwrap_write_loc(loc_info)\nif {ON_RANK_1}:\n    loc = torch.where(loc > 1, loc - 1, loc)",
        "target.kv",
    ),
    "it has the KV heads of rank 0": (
        "sglang.srt.layers.linear.QKVParallelLinear.weight_loader",
        "// self.num_kv_head_replicas",
        "* 0",
        "target.kv",
    ),
    "it drafts the worst token": (
        "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.draft_forward",
        "topk_index = torch.argmax(",
        f"topk_index = (torch.argmin if {ON_RANK_1} else torch.argmax)(",
        "draft.proposal",
    ),
}


@pytest.fixture(scope="module")
def ranked() -> Iterator[Host]:
    with Host(mode=Mode(tp=2)) as host:
        yield host


@pytest.fixture(scope="module")
def trace(ranked: Host, busy_case: Case, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return ranked.engine(busy_case).run(busy_case, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("path", ["tensor", *long("tensor_bucket", "disk")])
def test_each_rank_takes_its_share_of_new_weights(ranked: Host, path: WeightPath, tmp_path: Path) -> None:
    """SGLang takes tensors as a list with a part for each rank; weights that another process broadcasts are not tried."""
    case = by(path)
    verdict = judge(ranked.engine(case).run(case, tmp_path))
    assert verdict.status == "equal", verdict


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (by("distributed"), "weights that another process broadcasts, to several ranks: not tried"),
        (PLAIN_DECODE, "plain decode on several ranks: not tried"),
        (replace(PLAIN_DECODE, model="nemotron-h-nextn", engine=EngineSettings()), "has 1 KV head, which cannot be divided"),
    ],
    ids=["broadcast", "plain decode", "one KV head"],
)
def test_what_several_ranks_do_not_run_is_refused_with_the_reason(ranked: Host, case: Case, why: str) -> None:
    with pytest.raises(WouldNotStart, match=why) as refused:
        ranked.engine(case)
    assert refused.value.ours


def test_every_rank_is_judged_by_its_own_heads(trace: Trace) -> None:
    verdict = judge(trace)
    assert verdict.status == "equal", verdict
    alone = judge(Trace(trace.others[0].header, trace.others[0].tensors))
    assert alone.status == "unknown"  # what it has is right, and half of all
    assert "rank 1, of 2 ranks" in alone.reason
    assert {rule: 2 * count for rule, count in alone.checked.items()} == {
        rule: count for rule, count in verdict.checked.items() if rule != "ranks.agree"
    }
    assert verdict.checked["ranks.agree"] == len(trace.header.records)
    number = last_of(trace, "extend", "target_kv")
    assert [one.tensor(number, "target_kv").shape[3] for one in trace.ranks] == [1, 1]


@pytest.mark.parametrize("fault", spread(FAULTS, lambda fault: FAULTS[fault][3]))
def test_a_fault_of_one_rank_is_found_and_named(ranked: Host, busy_case: Case, tmp_path: Path, fault: str) -> None:
    target, match, replacement, rule = FAULTS[fault]
    planted = Patch(name="planted", edits=(Edit(target=target, match=match, replacement=replacement),))
    found = ranked.engine(busy_case, (planted,)).run(busy_case, tmp_path, Limits(step=8.0))
    verdict = judge(found)
    assert verdict.first is not None
    assert (verdict.status, verdict.rule, verdict.first.rank) == ("diverged", rule, 1), verdict
    assert "rank 1, request a" in argue(found.header, verdict, trace=found)


LATENT_ROWS = Edit(
    target="sglang.srt.models.deepseek_common.attention_forward_methods.forward_mha.DeepseekMHAForwardMixin._set_mla_kv_buffer",
    match="latent_cache, None",
    replacement=f"latent_cache.roll(-1, 0) if {ON_RANK_1} else latent_cache, None",
)


@pytest.mark.long
@pytest.mark.parametrize("fault", [(), (LATENT_ROWS,)], ids=["as released", "rows of the next position on rank 1"])
def test_every_rank_keeps_whole_latent_rows(ranked: Host, busy_case: Case, tmp_path: Path, fault: tuple[Edit, ...]) -> None:
    case = replace(busy_case, model="kimi-k2-eagle3")
    patches = (Patch(name="planted", edits=fault),) if fault else ()
    found = ranked.engine(case, patches).run(case, tmp_path, Limits(step=8.0))
    verdict = judge(found)
    number = last_of(found, "extend", "target_kv")
    assert [one.tensor(number, "target_kv").shape[3] for one in found.ranks] == [1, 1]
    if not fault:
        assert verdict.status == "equal", verdict
        return
    assert verdict.first is not None
    assert (verdict.status, verdict.rule, verdict.first.rank) == ("diverged", "target.kv", 1), verdict


@pytest.mark.parametrize(
    ("statement", "rule", "reason"),
    [
        ("raise ValueError('the rank raised')", "engine.crash", "rank 1: ValueError: the rank raised"),
        *long(("import os; os.kill(os.getpid(), 9)", "engine.crash", "rank 1: killed by SIGKILL")),
        *long(("import time; time.sleep(10**6)", "engine.hang", "no end of the step within 5 s (last seen: rank 0: verify")),
    ],
)
def test_a_rank_that_dies_or_hangs_ends_the_others(
    ranked: Host, busy_case: Case, trace: Trace, tmp_path: Path, statement: str, rule: str, reason: str
) -> None:
    dying = Edit(
        target=VERIFY,
        match="return run_eagle_verify(",
        replacement=f"import torch\nif {ON_RANK_1}:\n    {statement}\nreturn run_eagle_verify(",
    )
    before = _descendants(os.getpid())
    patch = Patch(name=f"dying {statement}", edits=(dying,))
    found = ranked.engine(busy_case, (patch,)).run(busy_case, tmp_path, Limits(step=5.0))
    assert len(_descendants(os.getpid()) - before) == 1  # the supervisor is left, and starts others
    verdict = judge(found)
    assert (verdict.status, verdict.rule) == ("unknown", rule)
    assert verdict.reason.startswith(reason)
    assert {one.header.ending for one in found.ranks} == {found.header.ending}
    (tmp_path / "after").mkdir()
    after = ranked.engine(busy_case).run(busy_case, tmp_path / "after")
    assert diff(after, trace).differences == []


def _descendants(of: int) -> set[int]:
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it has just ended
            continue
        if state != "Z":
            children.setdefault(int(parent), []).append(int(stat.parent.name))
    found, new = set[int](), {of}
    while new:
        found |= new
        new = {child for parent in new for child in children.get(parent, ())}
    return found


def _with_rank_1(trace: Trace, other: Trace) -> Trace:
    return Trace(trace.header, trace.tensors, [other])


def test_an_integer_that_no_reference_knows_must_be_that_of_rank_0(trace: Trace) -> None:
    other = trace.others[0]
    number = last_of(other, "cached", "slots")
    odd = changed(other, {f"{number}.slots": bump(other.tensor(number, "slots"))})
    verdict = judge(_with_rank_1(trace, odd))
    assert verdict.first is not None
    assert (verdict.status, verdict.rule, verdict.first.rank) == ("diverged", "ranks.agree", 1)
    assert judge(_with_rank_1(trace, odd), frozenset({"ranks.agree"})).status == "equal"


def test_a_row_that_was_written_again_is_recorded_where_its_bits_are_others(trace: Trace) -> None:
    """What 0.5.17 does after a retraction: one rank's heads of a row have the same bits, another's the next ones."""
    other = trace.others[0]
    number = last_of(other, "extend", "draft_rows")
    request = other.header.records[number].request
    before = max(n for n in every(other, "prefill", "draft_rows") if other.header.records[n].request == request)
    again = {
        f"{number}.{name}": torch.cat([other.tensor(before, name)[:1], other.tensor(number, name)])
        for name in ("draft_rows", "draft_kv")
    }
    assert judge(_with_rank_1(trace, changed(other, again))).status == "equal"
    again[f"{number}.draft_kv"] = nudge(again[f"{number}.draft_kv"])
    assert judge(_with_rank_1(trace, changed(other, again))).rule == "draft.kv"
    fewer = {f"{number}.{name}": other.tensor(number, name)[:-1] for name in ("draft_rows", "draft_kv")}
    assert judge(_with_rank_1(trace, changed(other, fewer))).status == "unknown"


def test_what_a_rank_did_not_record_is_never_equal(trace: Trace) -> None:
    for stage in ("batch", "extend", "finished"):
        number = last_of(trace, stage)
        cut = without(trace.others[0], lambda n, _, number=number: n == number)  # type: ignore[misc]
        assert judge(_with_rank_1(trace, cut)).status != "equal", stage


def test_only_the_traces_of_all_ranks_of_one_run_are_equal(trace: Trace) -> None:
    other = trace.others[0]
    crashed = replace(other.header, ending=replace(other.header.ending, kind="crashed"))
    elsewhere = replace(other.header, case=replace(other.header.case, name="another"))
    for ranks in (
        trace.ranks[:1],
        (trace, Trace(trace.header, trace.tensors)),
        (trace, other, other),
        (other, Trace(trace.header, trace.tensors)),
        (trace, Trace(crashed, other.tensors)),
        (trace, Trace(elsewhere, other.tensors)),
    ):
        verdict = judge(Trace(ranks[0].header, ranks[0].tensors, ranks[1:]))
        assert verdict.status == "unknown"
        assert "not of all ranks of one run" in verdict.reason


def test_the_rows_of_another_rank_are_not_its_own(trace: Trace) -> None:
    verdict = judge(_with_rank_1(trace, Trace(trace.others[0].header, trace.tensors)))
    assert verdict.first is not None
    assert (verdict.status, verdict.rule, verdict.first.rank) == ("diverged", "target.kv", 1)


def test_traces_of_ranks_are_read_together_or_not_at_all(ranked: Host, busy_case: Case, tmp_path: Path) -> None:
    ranked.engine(busy_case).run(busy_case, tmp_path)
    assert [one.header.engine.rank for one in read_trace(tmp_path).ranks] == [0, 1]
    (rank_folder(tmp_path, 1) / "trace.json").unlink()
    with pytest.raises(InputError, match="rank-1"):
        read_trace(tmp_path)


def test_only_traces_of_equally_many_ranks_are_compared(trace: Trace, busy_trace: Trace) -> None:
    with pytest.raises(InputError, match="ranks"):
        diff(trace, busy_trace)
    assert diff(trace, trace).compared == 2 * diff(*[replace_alone(trace)] * 2).compared


def replace_alone(trace: Trace) -> Trace:
    return Trace(replace(trace.header, engine=replace(trace.header.engine, tp=1)), trace.tensors)
