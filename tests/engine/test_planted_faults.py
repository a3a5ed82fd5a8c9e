"""Break the real worker in one place: the judge must name the rule, at the place where the wrong number first shows."""

import pytest

from eagletwin.harness.core.case import Case
from eagletwin.harness.core.patch import Edit
from eagletwin.harness.judge.judge import judge

from ..rows import spread
from .conftest import Runner

WORKER = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker"
COMMON = "sglang.srt.speculative.eagle_worker_common"

FINISH = "sglang.srt.managers.schedule_batch.Req.update_finish_state"
ATTENTION = "sglang.srt.layers.attention.triton_backend.TritonAttnBackend"
DECODE_METADATA = "sglang.srt.layers.attention.triton_backend.TritonMultiStepDraftBackend.common_template"
LAST_STEP_ROW_0 = (
    "kv_indices_buffer[self.speculative_num_steps - 2, 0] = kv_indices_buffer[self.speculative_num_steps - 2, 1]\n"
    "if call_fn is None:"
)

PLANTED = {
    "the target's hidden states of the next row": (
        Edit(
            target=f"{WORKER}._draft_extend_for_decode",
            match="hidden_states=batch_result.logits_output.hidden_states,",
            replacement="hidden_states=batch_result.logits_output.hidden_states.roll(1, 0),",
        ),
        "draft.hidden_in",
    ),
    "every draft step writes the first step's slot": (
        Edit(
            target=f"{WORKER}.draft_forward",
            match="forward_batch.out_cache_loc = out_cache_loc[i]",
            replacement="forward_batch.out_cache_loc = out_cache_loc[0]",
        ),
        "draft.slots",
    ),
    "the least likely token is drafted": (
        Edit(target=f"{WORKER}.draft_forward", match="topk_index = torch.argmax(", replacement="topk_index = torch.argmin("),
        "draft.proposal",
    ),
    "draft decode consumes its input state again": (
        Edit(
            target=f"{WORKER}.draft_forward",
            match="hidden_states = logits_output.hidden_states",
            replacement="hidden_states = hidden_states",
        ),
        "draft.hidden_in",
    ),
    "the last row is proposed from, not the last accepted one": (
        Edit(
            target=f"{WORKER}._draft_extend_for_decode",
            match="+ batch_result.accept_lens\n            - 1",
            replacement="+ self.speculative_num_draft_tokens\n            - 1",
        ),
        "draft.hidden_in",
    ),
    "prefill rows are not shifted": (
        Edit(
            target=f"{WORKER}._draft_extend_for_prefill",
            match="torch.cat((input_ids[1:], tail_tokens[i].reshape(1)))",
            replacement="input_ids",
        ),
        "draft.input_ids",
    ),
    "the verify tree is one position late": (
        Edit(target=f"{COMMON}.build_eagle_verify_input", match="positions=position,", replacement="positions=position + 1,"),
        "tree.positions",
    ),
    "one draft token too few is accepted": (
        Edit(
            target=f"{COMMON}.run_eagle_verify",
            match="    fused_commit_outputs = predict.is_cuda",
            replacement="    accept_lens = torch.clamp(accept_lens - 1, min=1)\n    fused_commit_outputs = predict.is_cuda",
        ),
        "verify.accept",
    ),
    "half of the tokens are generated": (
        Edit(
            target=f"{FINISH}",
            match="if len(self.output_ids) >= self.sampling_params.max_new_tokens:",
            replacement="if len(self.output_ids) >= self.sampling_params.max_new_tokens // 2:",
        ),
        "output.tokens",
    ),
    "nothing is sent to the detokenizer": (
        Edit(
            target="sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer.stream_output",
            match="if self.is_generation:",
            replacement="reqs = []\nif self.is_generation:",
        ),
        "output.tokens",
    ),
    "a finished request forgets what it emitted": (
        Edit(
            target="sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer.stream_output",
            match="if envs.SGLANG_TEST_CRASH_AFTER_STREAM_OUTPUTS.get() > 0:",
            replacement=(
                "for req in reqs:\n"
                "    if req.finished():\n"
                "        del req.output_ids[1:]\n"
                "if envs.SGLANG_TEST_CRASH_AFTER_STREAM_OUTPUTS.get() > 0:"
            ),
        ),
        "draft.kv",
    ),
    "locks on the prefix cache are never released": (
        Edit(
            target="sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.dec_lock_ref",
            match="if self.disable:",
            replacement="if True:",
        ),
        "pool.accounting",
    ),
    "the last draft step attends to row 1 in place of row 0": (
        Edit(target=DECODE_METADATA, match="if call_fn is None:", replacement=LAST_STEP_ROW_0),
        "draft.proposal",
    ),
    "verify attends to row 1 in place of row 0": (
        Edit(
            target=f"{ATTENTION}.forward_extend",
            match="kv_indices = self.forward_metadata.kv_indices",
            replacement=(
                "kv_indices = self.forward_metadata.kv_indices\n"
                "if forward_batch.forward_mode.is_target_verify():\n"
                "    kv_indices = kv_indices.clone()\n"
                "    kv_indices[0] = kv_indices[1]"
            ),
        ),
        "target.hidden",
    ),
    "freed slots are lost": (
        Edit(
            target="sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator._release_page_ids",
            match="torch.cat((*page_ids, self.free_pages))",
            replacement="self.free_pages",
        ),
        "pool.accounting",
    ),
}


@pytest.mark.parametrize("fault", spread(sorted(PLANTED), lambda fault: PLANTED[fault][-1]))
def test_a_fault_in_the_worker_is_found_and_named(run: Runner, busy_case: Case, fault: str) -> None:
    edit, rule = PLANTED[fault]
    trace, verdict = run(busy_case, edit)
    assert (verdict.status, verdict.rule) == ("diverged", rule), (verdict, trace.header.ending)


def test_a_read_of_an_unwritten_slot_is_seen(run: Runner, busy_case: Case) -> None:
    """The worker skips one draft row's KV write: a reader of the slot reads poison, which no rule on inputs can see."""
    fault = Edit(
        target=f"{WORKER}._draft_extend_for_prefill",
        match="logits_output = self.draft_runner.forward(forward_batch).logits_output",
        replacement=(
            "logits_output = self.draft_runner.forward(forward_batch).logits_output\n"
            "self.draft_runner.token_to_kv_pool.k_buffer[0][forward_batch.out_cache_loc[:1]] = 0.25\n"
            "self.draft_runner.token_to_kv_pool.v_buffer[0][forward_batch.out_cache_loc[:1]] = 1.0e4"
        ),
    )
    trace, verdict = run(busy_case, fault)
    assert (verdict.status, verdict.rule) == ("diverged", "draft.kv")
    blind = judge(trace, frozenset({"draft.kv"}))
    assert blind.status == "diverged"  # the poison alone shows in what attention made of it
    assert blind.rule in ("draft.hidden_in", "draft.proposal", "draft.scratch_kv")


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_request_that_the_scheduler_aborts_is_unknown_unless_nobody_else_has_memory(
    run: Runner, busy_case: Case, name: str
) -> None:
    """b runs beside a, and memory may have been short for both; a has a pool for itself that has room for all of it."""
    abort = Edit(
        target=FINISH,
        match="if len(self.output_ids) >= self.sampling_params.max_new_tokens:",
        replacement=(
            f"if self.rid == {name!r} and len(self.output_ids) >= 3:\n"
            "    self.finished_reason, self.finished_len = FINISH_ABORT('out of memory'), len(self.output_ids)\n"
            "    return\n"
            "if len(self.output_ids) >= self.sampling_params.max_new_tokens:"
        ),
    )
    _, verdict = run(busy_case, abort)
    if name == "b":
        assert (verdict.status, "the scheduler aborted request b" in verdict.reason) == ("unknown", True), verdict
    else:
        assert verdict.first is not None
        assert (verdict.rule, verdict.first.index) == ("schedule.events", "end of a"), verdict
