"""DP attention on a CPU (gloo, a process a rank): each rank is judged by its own requests, and idle batches change nothing."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from eagletwin.cases.ledger.dp import ENTRIES
from eagletwin.harness.core.case import Case, EngineSettings, Event, Request, Sampling, SGLangSettings
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.run_spec import CPU, Limits, mode_of_case
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.engines.host import Host
from eagletwin.harness.engines.inside.blame import NotDriven
from eagletwin.harness.engines.sglang.boot import cuda
from eagletwin.harness.families import RECIPES, family_of
from eagletwin.harness.families.dimensions.dimension import with_settings
from eagletwin.harness.families.valid import check_case, not_driven
from eagletwin.harness.judge.judge import judge

from ..rows import spread
from .changes import bump, changed, last_of, without

PROMPT = (49, 53, 5, 33, 65, 62, 51, 38, 61, 45, 74, 27, 64, 17, 36, 17, 12, 79, 32)
# Rank 1 idles at first, while rank 0 prefills or verifies; later batches of the two have other sizes, and rank 0 ends first.
CASE = Case(
    name="two-ranks",
    model="deepseek-nextn",
    num_steps=3,
    chunked_prefill_size=32,
    requests=(
        Request(id="a", prompt=PROMPT, max_new_tokens=14),
        Request(id="b", prompt=PROMPT[3:12], max_new_tokens=5, arrive=5),
        Request(id="c", prompt=PROMPT[::-1][:11], max_new_tokens=9, arrive=3, dp_rank=1),
        Request(id="d", prompt=PROMPT[5:], max_new_tokens=12, arrive=12, dp_rank=1),
        Request(id="e", prompt=PROMPT[2:9], max_new_tokens=16, arrive=13, dp_rank=1),
    ),
    engine=EngineSettings(sglang=SGLangSettings(radix_cache=True, max_total_tokens=512, attn_dp_size=2)),
)
LIVE = {entry.id: entry.remedy for entry in ENTRIES if entry.remedy is not None}

_LAYERS = "sglang.srt.layers."
_BATCH = "sglang.srt.model_executor.forward_batch_info.ForwardBatch."
_DRAFT = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker."
_SCALE = "sglang.srt.speculative.spec_info.spec_scale_global_num_tokens"
# Function, what is in it, and what takes its place; the rule that must name it, and on which rank.
FAULTS = {
    "an idle rank writes a row of its draft": (
        f"{_DRAFT}_draft_forward_idle",
        "input_ids = forward_batch.input_ids",
        "input_ids = forward_batch.input_ids\nself.draft_runner.token_to_kv_pool.kv_buffer[0][9] = 1.0",
        ("ranks.idle", 0),
    ),
    "padding is counted": (
        _SCALE,
        "x * spec_info.num_tokens_per_req",
        "(x + 1) * spec_info.num_tokens_per_req",
        ("ranks.gathered", 1),
    ),
    "counts are another rank's": (
        _SCALE,
        "for x in global_num_tokens]",
        "for x in global_num_tokens[::-1]]",
        ("ranks.gathered", 1),
    ),
    "a rank counts its own tokens alone": (
        "sglang.srt.managers.scheduler_components.dp_attn._update_gather_batch",
        "batch.global_num_tokens = mlp_sync_info.global_num_tokens",
        "batch.global_num_tokens = [mlp_sync_info.num_tokens] * 2",
        ("ranks.gathered", 1),
    ),
    "an idle rank skips a step of the draft": (
        f"{_DRAFT}_draft_forward_idle",
        "range(self.speculative_num_steps - 1)",
        "range(self.speculative_num_steps - 2)",
        ("ranks.gathered", 1),
    ),
    "a rank prefills while another drafts": (
        "sglang.srt.managers.scheduler.Scheduler.get_next_batch_to_run",
        "need_mlp_sync = new_batch is None",
        "need_mlp_sync = False",
        ("ranks.gathered", 0),
    ),
    "all ranks gather to the place of the first": (
        f"{_LAYERS}dp_attention._dp_gather_via_all_reduce",
        "local_tokens, 0, local_start_pos,",
        "local_tokens, 0, local_start_pos * 0,",
        ("draft.proposal", 1),
    ),
    "a rank takes the rows of the first": (
        f"{_LAYERS}dp_attention.dp_scatter",
        "global_tokens, 0, local_start_pos,",
        "global_tokens, 0, local_start_pos * 0,",
        ("draft.proposal", 1),
    ),
    "a rank's rows begin one late": (
        f"{_LAYERS}dp_attention.get_dp_local_info",
        "local_start_pos = cumtokens[dp_rank - 1]",
        "local_start_pos = cumtokens[dp_rank - 1] + 1",
        ("kernel.memory", None),  # its last row is past the buffer
    ),
    "rows are gathered in another order": (
        f"{_LAYERS}dp_attention._dp_gather_via_all_gather",
        "all_gather_into_tensor(global_tokens, local_tokens)",
        "all_gather_into_tensor(global_tokens, local_tokens.roll(1, 0))",
        ("target.kv", 0),
    ),
    "a rank takes the logits of the first": (
        f"{_LAYERS}logits_processor.LogitsMetadata.compute_dp_attention_metadata",
        "dp_local_start_pos = cumtokens[dp_rank - 1]",
        "dp_local_start_pos = cumtokens[dp_rank - 1] * 0",
        ("draft.proposal", 1),
    ),
    "draft extend has logits of a row for each request": (
        f"{_DRAFT}_draft_extend_for_decode",
        "num_tokens_for_logprob_per_req=self.speculative_num_draft_tokens,",
        "num_tokens_for_logprob_per_req=1,",
        ("draft.proposal", 0),
    ),
    "padding writes to a request's slot": (
        f"{_BATCH}_pad_inputs_to_size",
        "self.out_cache_loc = self._pad_tensor_to_size(self.out_cache_loc, num_tokens)",
        "self.out_cache_loc = self._pad_tensor_to_size(self.out_cache_loc, num_tokens, value=int((*self.out_cache_loc, 0)[0]))",
        ("target.kv", 1),
    ),
    "verify hands on the states of padding": (
        f"{_BATCH}post_forward_mlp_sync_batch",
        "num_tokens = bs * self.spec_info.num_tokens_per_req",
        "num_tokens = bs * self.spec_info.num_tokens_per_req\n"
        "logits_output.hidden_states = logits_output.hidden_states.roll(1, 0)",
        ("target.hidden", 0),
    ),
    "positions of a padded batch are one off": (
        f"{_BATCH}post_forward_mlp_sync_batch",
        "self.positions = self.positions[:num_tokens]",
        "self.positions = self.positions[:num_tokens] + 1",
        ("draft.positions", 0),
    ),
}


def remedies_of(model: str) -> tuple[Patch, ...]:
    """What keeps the ledger's bugs out of a case of this recipe."""
    layers = ("dp-layers-logits",) if RECIPES[model].mtp_layers else ()
    return tuple(LIVE[name] for name in ("dp-idle-verify", "dp-draft-plan", "dp-padded-mask", *layers))


@pytest.fixture(scope="module")
def trace(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return host.engine(CASE, remedies_of(CASE.model)).run(CASE, tmp_path_factory.mktemp("ranks"))


def test_each_rank_is_judged_by_its_own_requests(trace: Trace) -> None:
    verdict = judge(trace)
    assert verdict.status == "equal", verdict
    assert [[request.id for request in one.header.case.requests] for one in trace.ranks] == [["a", "b"], ["c", "d", "e"]]
    assert {"batch", "batch_grows", "batch_shrinks", "rejection"} <= {*verdict.exercised}
    assert {"ranks.gathered", "ranks.idle"} <= {*verdict.checked}
    assert [*verdict.shares] == ["a", "b", "c", "d", "e"]
    for one in trace.ranks:  # one idles while the other prefills, and while it verifies
        assert any(record.stage == "idle" for record in one.header.records)


_EVENTS = (
    Event(at=7, kind="retract"),
    Event(at=14, kind="pause"),
    Event(at=16, kind="resume"),
    Event(at=18, kind="abort", request="e"),
    Event(at=20, kind="flush"),
    Event(at=21, kind="pause"),  # nothing ends it: each rank goes on when all that comes for any has come
)
_SAMPLED = replace(
    CASE, requests=tuple(replace(request, sampling=Sampling(temperature=0.7)) for request in CASE.requests), events=_EVENTS
)


_PRODUCTION = with_settings(replace(CASE, topk=2, num_draft_tokens=5), graphs=(1, 2, 4), overlap=True, cuda_branches=True)
_RARER = {"overlap": with_settings(CASE, overlap=True)} | {
    name: replace(CASE, model=name, num_steps=2)
    for name, recipe in RECIPES.items()
    if family_of(recipe).dp_attention and name != CASE.model
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(replace(_SAMPLED, topk=3, num_draft_tokens=6, page_size=4), id="tree, pages, events, coins"),
        pytest.param(_PRODUCTION, id="tree, graphs, overlap"),
        *(pytest.param(case, marks=pytest.mark.long, id=name) for name, case in _RARER.items()),
    ],
)
def test_cases_of_two_ranks_are_equal(host: Host, tmp_path: Path, case: Case) -> None:
    """The ledger's bugs are of batches without a graph: as released, graphs are right."""
    patches = () if case.engine.sglang.graphs else remedies_of(case.model)
    verdict = judge(host.engine(case, patches).run(case, tmp_path))
    assert verdict.status == "equal", verdict


def test_three_ranks_are_equal(host: Host, tmp_path: Path) -> None:
    """One has nothing to do at all."""
    case = with_settings(replace(CASE, model="qwen3-moe-eagle3", requests=CASE.requests[:3]), attn_dp_size=3)
    trace = host.engine(case, remedies_of(case.model)).run(case, tmp_path)
    assert judge(trace).status == "equal", judge(trace)
    assert [len(one.header.case.requests) for one in trace.ranks] == [2, 1, 0]


@pytest.mark.parametrize("fault", spread(FAULTS, lambda fault: FAULTS[fault][3][0].partition(".")[0]))
def test_a_fault_is_named_by_its_rule(host: Host, tmp_path: Path, fault: str) -> None:
    target, match, replacement, named = FAULTS[fault]
    planted = Patch(name="planted", edits=(Edit(target=target, match=match, replacement=replacement),))
    verdict = judge(host.engine(CASE, (*remedies_of(CASE.model), planted)).run(CASE, tmp_path, Limits(step=10.0)))
    assert verdict.first is not None, verdict
    assert (verdict.status, verdict.rule, verdict.first.rank) == ("diverged", *named), verdict


def test_what_a_rank_did_not_record_is_never_equal(trace: Trace) -> None:
    other = trace.others[0]
    for stage in ("gathered", "verify", "finished"):
        less = without(other, lambda _, record: record.stage == stage)  # noqa: B023
        assert judge(Trace(trace.header, trace.tensors, [less])).status != "equal", stage
    for stage in ("gathered", "idle"):
        both = [without(one, lambda _, record: record.stage == stage) for one in trace.processes]  # noqa: B023
        assert judge(Trace(both[0].header, both[0].tensors, both[1:])).status == "unknown", stage
    assert judge(Trace(trace.header, trace.tensors)).status == "unknown"
    number = last_of(other, "gathered", "counts")
    counted = changed(other, {f"{number}.counts": bump(other.tensor(number, "counts"))})
    assert judge(Trace(trace.header, trace.tensors, [counted])).rule == "ranks.gathered"


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (replace(CASE, model="llama-tiny"), "has no DP attention"),
        (with_settings(CASE, attn_dp_size=1), "is of dp_rank 1, and engine.sglang.attn_dp_size is 1"),
        (
            replace(CASE, requests=(*CASE.requests[:2], replace(CASE.requests[2], after="a"))),
            "which another rank of DP attention serves",
        ),
    ],
)
def test_a_case_that_no_ranks_can_have_is_refused(case: Case, why: str) -> None:
    with pytest.raises(InputError, match=why):
        check_case(case, "case")


def test_what_is_not_run_with_dp_attention_says_so() -> None:
    for mode, settings, why in (
        (CPU, {"plain_decode": True}, "plain decode with DP attention: not tried"),
        (replace(CPU, tp=2), {}, "DP attention on several ranks: not tried"),
        (replace(CPU, dtype="bfloat16"), {}, "DP attention in bfloat16: not tried"),
        (replace(CPU, device="cuda"), {}, ""),
        (CPU, {}, ""),
    ):
        case = with_settings(CASE, **settings)
        assert not_driven(case, mode_of_case(mode, case.engine.sglang)) == why


def test_ranks_without_a_gpu_each_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    mode = mode_of_case(replace(CPU, device="cuda"), CASE.engine.sglang)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(NotDriven, match="2 ranks need a GPU each, and torch sees 1"):
        cuda.refuse(mode)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    cuda.refuse(mode)
