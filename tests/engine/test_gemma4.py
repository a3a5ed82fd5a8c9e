"""Gemma-4 with its assistant (frozen-KV MTP): SGLang's own worker is equal, and a fault in what the draft reads is named."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.core.case import Case, EngineSettings, Event, Request, SGLangSettings
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.engines.host import Host
from eagletwin.harness.judge.judge import judge

from ..rows import spread
from .conftest import Runner

MODEL = "gemma-4-assistant"
WORKER = "sglang.srt.speculative.frozen_kv_mtp_worker_v2.FrozenKVMTPDraftWorker"
UTILS = "sglang.srt.speculative.frozen_kv_mtp_utils"
ASSISTANT = "sglang.srt.models.gemma4_mtp.Gemma4AssistantForCausalLM"

PROMPT = (5, 17, 33, 8, 60, 41, 2, 19, 77, 50, 3, 9, 12, 25, 31, 4, 70, 66, 1)
CHAIN = Case(
    name="frozen-chain",
    model=MODEL,
    num_steps=3,
    page_size=4,
    chunked_prefill_size=512,
    chunks=(8, 8),
    requests=(
        Request(id="a", prompt=PROMPT, max_new_tokens=12),
        Request(id="b", prompt=(*PROMPT[:12], 5, 7), max_new_tokens=5, arrive=5),
    ),
    events=(Event(at=7, kind="retract"),),
    engine=EngineSettings(sglang=SGLangSettings(radix_cache=True, max_total_tokens=256)),
    exercises=("chunked_prefill", "batch", "radix_hit", "rejection", "retraction_in_decode"),
)
TREE = replace(
    CHAIN, name="frozen-tree", topk=3, num_draft_tokens=8, exercises=("tree", "path_not_in_front", "branch_changes_parent")
)

# what is planted -> function, what is replaced, by what, and the rule that names it
PLANTED = {
    "layers with a window read the rows of the first one": (
        f"{ASSISTANT}.build_frozen_kv_mtp_context",
        "physical[i] = by_type[t]",
        "physical[i] = target_text.layer_types.index(t)",
        "draft.proposal",
    ),
    "each step stands one position on": (
        f"{WORKER}.draft_forward",
        "self._set_positions(forward_batch)\n\n        with (",
        "forward_batch.positions = forward_batch.positions + 1\n\nwith (",
        "draft.positions",
    ),
    "all steps stand where the bonus token does": (
        f"{UTILS}.set_frozen_kv_positions",
        "torch.clamp(seq_lens - 1, min=0)",
        "torch.clamp(seq_lens, min=0)",
        "draft.positions",
    ),
    "the last committed row is not read": (
        f"{WORKER}._init_frozen_kv_metadata",
        "self.draft_attn_backend.init_forward_metadata(forward_batch)",
        "whole = forward_batch.seq_lens\nforward_batch.seq_lens = whole - 1\n"
        "self.draft_attn_backend.init_forward_metadata(forward_batch)\nforward_batch.seq_lens = whole",
        "draft.proposal",
    ),
    "the state of another node is handed on": (
        f"{WORKER}._draft_extend_for_decode",
        "- 1\n",
        "- 2\n",
        "draft.hidden_in",
    ),
    "the state of the first row of a chunk is handed on": (
        f"{UTILS}.select_last_extend_hidden",
        "torch.cumsum(lens, dim=0) - 1",
        "torch.cumsum(lens, dim=0) - lens",
        "draft.hidden_in",
    ),
    "a step consumes the state that the target handed over": (
        f"{WORKER}.draft_forward",
        "forward_batch.spec_info.hidden_states = hidden_states",
        "forward_batch.spec_info.hidden_states = seed_prev_hidden",
        "draft.hidden_in",
    ),
    "the target's embedding is not scaled": (
        f"{ASSISTANT}.forward",
        "* self.target_embed_scale",
        "* 1",
        "draft.proposal",
    ),
}


@pytest.mark.parametrize("case", [CHAIN, TREE], ids=lambda case: case.name)
def test_it_is_equal_and_the_draft_writes_nothing(run: Runner, case: Case) -> None:
    trace, verdict = run(case)
    assert verdict.status == "equal", verdict
    stages = {record.stage for record in trace.header.records}
    assert {"draft.decode"} == {stage for stage in stages if stage.startswith("draft.")}
    assert {record.step for record in trace.header.records if record.stage == "draft.decode"} == {0, 1, 2}
    assert not any(name.startswith(("draft_", "scratch_")) for record in trace.header.records for name in record.tensors)
    assert min(verdict.checked[rule] for rule in ("draft.positions", "draft.hidden_in", "draft.proposal")) > 0
    assert not verdict.checked.get("draft.scratch_kv", 0)


@pytest.mark.parametrize("fault", spread(sorted(PLANTED)))
def test_a_fault_is_named(run: Runner, fault: str) -> None:
    target, match, replacement, rule = PLANTED[fault]
    _, verdict = run(CHAIN, Edit(target=target, match=match, replacement=replacement))
    assert (verdict.status, verdict.rule) == ("diverged", rule), verdict


@pytest.mark.long
def test_a_window_that_ends_is_a_row_short_in_the_draft_and_whole_with_the_remedy(run: Runner) -> None:
    """Live: PR 32087. The remedy is right in a chain and, but for what `tree-window` says, in a tree."""
    entry = LEDGER["decode-window"]
    assert entry.remedy is not None
    case = replace(CHAIN, model=entry.case.model, exercises=())
    found = [run(case, *edits)[1] for edits in ((), entry.remedy.edits)]
    assert [(verdict.status, verdict.rule) for verdict in found] == [("diverged", "draft.proposal"), ("equal", "")]


@pytest.mark.parametrize("mended", [False, True])
def test_without_overlap_the_worker_is_called_with_an_argument_that_it_does_not_take(
    host: Host, tmp_path: Path, mended: bool
) -> None:
    """Live since 0.5.19: docs/findings/frozen-kv.md."""
    call = Edit(
        target="sglang.srt.speculative.frozen_kv_mtp_worker_v2.FrozenKVMTPWorkerV2.forward_batch_generation",
        match="grammar_barrier=None",
        replacement="grammar_barrier=None, **_",
    )
    patch = Patch(name="without-overlap", edits=(call,) if mended else (), switches=("without-overlap",))
    trace = host.engine(CHAIN, (patch,)).run(CHAIN, tmp_path)
    verdict = judge(trace)
    if mended:
        assert verdict.status == "equal", verdict
        assert not trace.header.engine.overlap
    else:
        assert (verdict.status, verdict.rule) == ("unknown", "engine.crash"), verdict
        assert "unexpected keyword argument 'pp_proxy_tensors'" in verdict.reason
