"""Break the real worker in one place, of chains and of trees: the judge must name the rule at the first wrong number."""

import pytest
from msgspec.structs import replace

from eagletwin.harness.core.case import Case
from eagletwin.harness.core.patch import Edit
from eagletwin.harness.families.dimensions.dimension import with_settings
from eagletwin.harness.judge.judge import judge

from ..lab.gpu.faults import batch_of
from ..rows import spread
from .conftest import Runner

# Break the real worker in one place: the judge must name the rule, at the place where the wrong number first shows.


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


# Break the worker's draft trees in one place: the judge must name the rule, at the place where the wrong number first shows.
# Kernels cannot be edited, so a fault of a kernel is planted in what calls it: in an argument, or in what came back.


SPECULATIVE = "sglang.srt.speculative"
TREES_WORKER = f"{SPECULATIVE}.eagle_worker_v2.EagleDraftWorker"
TREES_COMMON = f"{SPECULATIVE}.eagle_worker_common"
UTILS = f"{SPECULATIVE}.eagle_utils"
FIRST = f"{SPECULATIVE}.spec_utils._select_top_k_tokens_first"
LATER = f"{SPECULATIVE}.spec_utils._select_top_k_tokens_later"
MOVE = f"{SPECULATIVE}.spec_utils.move_accept_tokens_to_target_kvcache"
ORGANIZE = f"{UTILS}.organize_draft_results"
VERIFY = "sglang.kernels.ops.speculative.spec_tree.verify_tree_greedy_func"
TREES_ATTENTION = "sglang.srt.layers.attention.triton_backend.TritonAttnBackend"
BRANCHES = "sglang.srt.layers.attention.triton_backend.TritonMultiStepDraftBackend.common_template"


def edit(target: str, match: str, replacement: str) -> Edit:
    return Edit(target=target, match=match, replacement=replacement)


def selecting(*lines: str) -> Edit:
    """After a step's k best were found and before anything is made of them."""
    here = "topk_index = topk_index.view(-1, topk_sq)"
    return edit(LATER, here, "\n".join([*lines, here]))


def built(*lines: str) -> Edit:
    """After the tree was built and before anybody sees it."""
    here = "return EagleVerifyInput(\n        draft_token"
    return edit(f"{TREES_COMMON}.build_eagle_verify_input", here, "\n".join([*lines, here]))


def drafting(line: str) -> Edit:
    """When draft_forward begins, with what the last draft extend proposed."""
    here = "out_cache_loc = per_step_draft_out_cache_loc("
    return edit(f"{TREES_WORKER}.draft_forward", here, f"{line}\n{here}")


def verifying(line: str) -> Edit:
    """Before the kernel that walks the tree."""
    here = "verify_tree_greedy_triton(\n"
    return edit(VERIFY, here, f"{line}\n{here}")


NEXT_BEST = "topk_cs_p, topk_cs_index = fast_topk(expand_scores.flatten(start_dim=1), topk + 1, dim=-1)"
TOPK = "topk_p, topk_index = fast_topk(probs, self.topk, dim=-1)"
RETURNED = "ret_topk_p, ret_topk_index = fast_topk(probs, self.topk, dim=-1)"
BEST = "top_scores = torch.topk(score_list, num_draft_token - 1, dim=-1)\n    top_scores_index = top_scores.indices"
SORTED = "torch.sort(top_scores_index).values"
COMPACT_TOKENS = (
    "predict = _compact_accept_to_front(\n        predict, accept_index, bs, num_draft_tokens=num_draft_tokens\n    )"
)
MOVED = "tgt_cache_loc, accept_out_cache_loc\n    )"
TREE_TOPK = "draft_tokens,\n            batch.seq_lens,\n            seq_lens_sum,\n            topk,"

TREES_PLANTED: dict[str, tuple[Edit, str]] = {
    # growing
    "probabilities of a step are all a fiftieth too small, which changes no choice": (
        edit(f"{TREES_WORKER}.draft_forward", TOPK, f"{TOPK}\ntopk_p = topk_p * 0.98"),
        "draft.proposal",
    ),
    "two requests have each other's probabilities": (drafting("topk_p = topk_p.flip(0)"), "tree.parents"),
    "two requests have each other's proposals": (drafting("topk_index = topk_index.flip(0)"), "draft.proposal"),
    "two requests have each other's hidden states": (drafting("hidden_states = hidden_states.flip(0)"), "draft.hidden_in"),
    "who goes on alone keeps the probabilities of who is done": (
        edit(
            f"{SPECULATIVE}.eagle_info.EagleDraftInput.filter_batch",
            "self.topk_p = self.topk_p[new_indices]",
            "self.topk_p = self.topk_p[: len(new_indices)]",
        ),
        "tree.parents",
    ),
    "the root's children get their states request by request, not child by child": (
        edit(FIRST, "hidden_states.repeat_interleave(topk, dim=0)", "hidden_states.repeat(topk, 1)"),
        "draft.hidden_in",
    ),
    "the first frontier is numbered from the root": (
        edit(FIRST, "torch.arange(-1, topk,", "torch.arange(-2, topk - 1,"),
        "tree.parents",
    ),
    "a branch goes on from the hidden state of its rank, not of its parent": (
        edit(LATER, "flat_cs // topk", "flat_cs % topk"),
        "draft.hidden_in",
    ),
    "all requests take hidden states of the first": (edit(LATER, "+ batch_offsets", "+ 0 * batch_offsets"), "draft.hidden_in"),
    "the frontier is in the reverse order": (
        selecting("topk_cs_p, topk_cs_index = topk_cs_p.flip(1), topk_cs_index.flip(1)"),
        "tree.parents",
    ),
    "the best candidate is not expanded": (
        selecting(NEXT_BEST, "topk_cs_p, topk_cs_index = topk_cs_p[:, 1:], topk_cs_index[:, 1:]"),
        "tree.parents",
    ),
    "candidates are numbered one too high": (edit(LATER, "(i - 1) + topk)", "(i - 1) + topk + 1)"), "tree.parents"),
    "candidates are numbered a depth too high": (edit(LATER, "topk_sq * (i - 1)", "topk_sq * i"), "tree.parents"),
    "scores are added": (edit(LATER, "scores.unsqueeze(2) * topk_p", "scores.unsqueeze(2) + topk_p"), "tree.parents"),
    "a score is its own probability alone": (edit(LATER, "scores.unsqueeze(2) * topk_p", "topk_p"), "tree.parents"),
    "scores are not those of the frontier": (
        edit(LATER, "hidden_states, topk_cs_p, tree", "hidden_states, scores, tree"),
        "tree.tokens",
    ),
    "scores are of square roots": (
        edit(f"{TREES_WORKER}.draft_forward", TOPK, f"{TOPK}\ntopk_p = topk_p.sqrt()"),
        "tree.parents",
    ),
    "probabilities of a step are of its candidates alone": (
        edit(f"{TREES_WORKER}.draft_forward", TOPK, f"{TOPK}\ntopk_p = topk_p / topk_p.sum(-1, keepdim=True)"),
        "draft.proposal",
    ),
    "a branch consumes its neighbour's token": (
        edit(LATER, "torch.gather(topk_index, 1, topk_cs_index)", "torch.gather(topk_index, 1, topk_cs_index.roll(1, 1))"),
        "draft.input_ids",
    ),
    "the root's probabilities are of its children alone": (
        edit(
            f"{TREES_WORKER}._draft_extend_for_decode",
            RETURNED,
            f"{RETURNED}\nret_topk_p = ret_topk_p / ret_topk_p.sum(-1, keepdim=True)",
        ),
        "draft.proposal",
    ),
    "positions of branches stand still": (
        edit(f"{TREES_WORKER}.draft_forward", TOPK, f"{TOPK}\nforward_batch.positions.sub_(1)"),
        "draft.positions",
    ),
    "positions of two requests are mixed up": (
        edit(
            f"{TREES_COMMON}.prepare_for_draft", "batch.seq_lens.repeat_interleave(topk, dim=0)", "batch.seq_lens.repeat(topk)"
        ),
        "draft.positions",
    ),
    "each branch stands one further": (  # which also reads past the end of a kernel's tensor: the run ends there
        edit(
            f"{TREES_COMMON}.prepare_for_draft",
            "batch.seq_lens.repeat_interleave(topk, dim=0)",
            "batch.seq_lens.repeat_interleave(topk, dim=0) + torch.arange(topk).repeat(len(batch.seq_lens))",
        ),
        "draft.positions",
    ),
    # selecting
    "the final selection is in the order of scores": (edit(ORGANIZE, SORTED, "top_scores_index"), "tree.tokens"),
    "the best of all candidates is left out": (
        edit(ORGANIZE, BEST, "top_scores_index = torch.topk(score_list, num_draft_token, dim=-1).indices[:, 1:]"),
        "tree.tokens",
    ),
    "the first candidates are selected": (
        edit(ORGANIZE, SORTED, "torch.arange(num_draft_token - 1).expand(score_list.shape[0], -1)"),
        "tree.tokens",
    ),
    "deep nodes have the token of the candidate before": (
        edit(ORGANIZE, "index=top_scores_index, dim=1", "index=top_scores_index - (top_scores_index > 20).long(), dim=1"),
        "tree.tokens",
    ),
    # building
    "the tree is built for one child less": (
        edit(f"{TREES_COMMON}.build_eagle_verify_input", TREE_TOPK, TREE_TOPK.removesuffix(",") + " - 1,"),
        "kernel.memory",
    ),
    "the tree is built from parents out of place": (
        edit(
            f"{TREES_COMMON}.build_eagle_verify_input",
            "parent_list,\n            top_scores_index,",
            "torch.cat([parent_list[:, :1], parent_list[:, 1:].roll(1, 1)], 1),\n            top_scores_index,",
        ),
        "tree.positions",
    ),
    "the root sees a node": (built("tree_mask[int(batch.seq_lens[0]) + 2] ^= True"), "tree.mask"),
    "a node does not see the root": (
        built("tree_mask[(int(batch.seq_lens[0]) + num_draft_tokens - 1) * num_draft_tokens] = False"),
        "tree.mask",
    ),
    "a node stands one deeper": (built("position[num_draft_tokens - 1] += 1"), "tree.positions"),
    "a sibling is lost": (built("retrieve_next_sibling[0, 1] = -1"), "tree.retrieve"),
    "a first child is passed over": (built("retrieve_next_token[0, 0] = 2"), "tree.retrieve"),
    "nodes of the second request are those of the first": (built("retrieve_index.fmod_(num_draft_tokens)"), "tree.retrieve"),
    # verifying
    "verify stops at the first sibling": (
        verifying("retrieve_next_sibling = torch.full_like(retrieve_next_sibling, -1)"),
        "verify.accept",
    ),
    "verify goes by the argmax of the node before": (verifying("target_predict = target_predict.roll(1, 1)"), "verify.accept"),
    "verify compares the token of the node before": (verifying("candidates = candidates.roll(1, 1)"), "verify.accept"),
    "every node sees every other": (
        edit(
            f"{TREES_ATTENTION}.forward_extend",
            "kv_indices = self.forward_metadata.kv_indices",
            "kv_indices = self.forward_metadata.kv_indices\n"
            "if forward_batch.forward_mode.is_target_verify():\n"
            "    self.forward_metadata.custom_mask.fill_(True)",
        ),
        "target.hidden",
    ),
    "nodes are written one slot late": (
        edit(f"{UTILS}.eagle_prepare_for_verify", "start_offset=batch.seq_lens,", "start_offset=batch.seq_lens + 1,"),
        "draft.slots",
    ),
    "the bonus token is looked for at the stride of the tree": (
        edit(
            f"{TREES_COMMON}.run_eagle_verify", "accept_index.shape[1],\n            bs,", "num_draft_tokens,\n            bs,"
        ),
        "kernel.memory",
    ),
    # moving the path to the front
    "keys and values are not moved": (
        edit(MOVE, MOVED, "tgt_cache_loc[:0], accept_out_cache_loc[:0]\n    )"),
        "commit.path",
    ),
    "keys and values are moved the other way": (edit(MOVE, MOVED, "accept_out_cache_loc, tgt_cache_loc\n    )"), "commit.path"),
    "keys and values of one node too few are moved": (
        edit(MOVE, "num_correct_drafts + 1,\n        batch.out_cache_loc", "num_correct_drafts,\n        batch.out_cache_loc"),
        "commit.path",
    ),
    "keys and values of the node before are moved": (
        edit(MOVE, MOVED, "tgt_cache_loc, accept_out_cache_loc.roll(1)\n    )"),
        "commit.path",
    ),
    "two requests have each other's paths": (
        edit(MOVE, MOVED, "tgt_cache_loc.flip(0), accept_out_cache_loc\n    )"),
        "commit.path",
    ),
    "the path is also moved over the last committed row": (
        edit(
            MOVE,
            MOVED,
            "torch.cat([tgt_cache_loc, tgt_cache_loc[:1] - 1]),\n"
            "        torch.cat([accept_out_cache_loc, accept_out_cache_loc[:1]]),\n    )",
        ),
        "target.kv",
    ),
    "predicted tokens are not moved": (
        edit(f"{TREES_COMMON}._finalize_accept_tree_path", COMPACT_TOKENS, "pass"),
        "commit.path",
    ),
    "hidden states are not moved": (
        edit(f"{TREES_COMMON}._finalize_accept_tree_path", "if logits_output.hidden_states is not None:", "if False:"),
        "commit.path",
    ),
    "the path is moved one row behind the front": (
        edit(f"{TREES_COMMON}._compact_accept_to_front", "[:, :s1] = gathered", "[:, 1 : s1 + 1] = gathered"),
        "commit.path",
    ),
    "what is proposed comes from the deepest row there could be": (
        edit(
            f"{TREES_WORKER}._draft_extend_for_decode",
            "+ batch_result.accept_lens\n            - 1",
            "+ self.speculative_num_steps",
        ),
        "draft.hidden_in",
    ),
    # slots
    "room is reserved for half of a small tree": (
        edit(
            "sglang.srt.mem_cache.allocation_sizing.get_alloc_len_per_decode",
            "max(num_new_pages_per_topk * page_size * spec_topk, spec_tokens)",
            "spec_tokens // 2",
        ),
        "draft.slots",
    ),
    "the prefix's page is filled from the holes": (
        edit(
            f"{TREES_COMMON}.duplicate_prefix_tail_to_draft_branches",
            "token_to_kv_pool.move_kv_cache(tgt_slots, src_slots)",
            "token_to_kv_pool.move_kv_cache(src_slots, tgt_slots)",
        ),
        "draft.scratch_kv",
    ),
    "a branch has one page too few": (
        edit(f"{TREES_COMMON}.prepare_for_draft", "num_steps + page_size - 1) // page_size", "num_steps - 1) // page_size"),
        "draft.slots",
    ),
    "slots are given out by step and branch": (
        edit(
            f"{UTILS}.per_step_draft_out_cache_loc",
            "out_cache_loc.view(batch_size, topk, num_steps)\n        .permute(2, 0, 1)",
            "out_cache_loc.view(batch_size, num_steps, topk)\n        .permute(1, 0, 2)",
        ),
        "draft.slots",
    ),
    "branches have each other's slots": (
        edit(f"{UTILS}.per_step_draft_out_cache_loc", ".permute(2, 0, 1)", ".flip(1)\n        .permute(2, 0, 1)"),
        "draft.slots",
    ),
    "holes are not filled": (
        edit(f"{TREES_COMMON}.duplicate_prefix_tail_to_draft_branches", "if topk <= 1:", "if True:"),
        "draft.scratch_kv",
    ),
    "holes of the last branch want a row": (
        edit(
            f"{TREES_COMMON}.duplicate_prefix_tail_to_draft_branches",
            "< last_page.view(bs, 1, 1))",
            "< last_page.view(bs, 1, 1) - 1 * (branches == topk - 1))",
        ),
        "draft.scratch_kv",
    ),
    "holes are copies of the page before": (
        edit(
            f"{TREES_COMMON}.duplicate_prefix_tail_to_draft_branches",
            "(prefix_base.view(bs, 1, 1) + page_off.view(1, 1, page_size))",
            "(prefix_base.view(bs, 1, 1) - page_size + page_off.view(1, 1, page_size))",
        ),
        "draft.scratch_kv",
    ),
    "a branch attends to its neighbour's rows": (
        edit(
            BRANCHES,
            "if call_fn is None:",
            "m = int(forward_batch.seq_lens[0])\n"
            "kv_indices_buffer[1, m : m + 2] = kv_indices_buffer[1, 2 * m + 2 : 2 * m + 4]\n"
            "if call_fn is None:",
        ),
        "draft.proposal",
    ),
    "branches are read as if there were no pages": (edit(BRANCHES, "self.page_size,", "1,"), "draft.proposal"),
}


@pytest.mark.parametrize("fault", spread(sorted(TREES_PLANTED), lambda fault: TREES_PLANTED[fault][-1]))
def test_a_fault_in_the_worker_is_found_and_named_in_trees(run: Runner, busy_tree: Case, fault: str) -> None:
    planted, rule = TREES_PLANTED[fault]
    trace, verdict = run(busy_tree, planted)
    assert (verdict.status, verdict.rule) == ("diverged", rule), (verdict, trace.header.ending)


def test_holes_are_copied_for_kernels_that_read_whole_pages(run: Runner, busy_tree: Case) -> None:
    """This release's Triton kernels read slot by slot: nothing else shows a hole that was never filled."""
    trace, verdict = run(busy_tree, TREES_PLANTED["holes are not filled"][0])
    assert verdict.later.keys() == {"draft.scratch_kv"}
    assert judge(trace, frozenset({"draft.scratch_kv"})).status == "equal"


def test_a_frontier_in_another_order_alone_is_no_other_tree(run: Runner, busy_tree: Case) -> None:
    """The order decides who shares a branch's slots, and nothing else: what it leads to is right in its own terms."""
    _, verdict = run(busy_tree, TREES_PLANTED["the frontier is in the reverse order"][0])
    assert verdict.later.keys() == {"tree.parents"}


# Not seen, and why. What makes one of these diverge belongs into PLANTED.
UNSEEN: dict[str, Edit] = {
    # Half a percent at most, and the bound of a score is that of its logits: their errors are multiplied.
    "probabilities of a step are rounded to bfloat16": edit(
        f"{TREES_WORKER}.draft_forward", TOPK, f"{TOPK}\ntopk_p = topk_p.bfloat16().float()"
    ),
    # This release's kernels do not read those columns; what did would show in target.hidden.
    "a node does not see the prefix, in columns that nothing reads": built("tree_mask[0] = False"),
}


@pytest.mark.parametrize("fault", sorted(UNSEEN))
def test_what_is_not_seen_is_known(run: Runner, busy_tree: Case, fault: str) -> None:
    _, verdict = run(busy_tree, UNSEEN[fault])
    assert verdict.status == "equal", verdict


# FlashAttention's metadata, on a CPU: its kernels are a stand-in's, and what they are given is SGLang's own.

_FLASH = "sglang.srt.layers.attention.flashattention_backend"
_FLASH_EAGER, _FLASH_GRAPHS = (
    f"{_FLASH}.FlashAttentionBackend.{name}" for name in ("init_forward_metadata", "_apply_cuda_graph_metadata")
)
_GRAPHS = (1, 2, 4)


def of_verify(line: str) -> Edit:
    return edit(
        _FLASH_EAGER,
        "self.forward_metadata = metadata",
        f"if forward_batch.forward_mode.is_target_verify():\n    {line}\nself.forward_metadata = metadata",
    )


FLASH_PLANTED: dict[str, tuple[str, tuple[int, ...], Edit, str]] = {
    "the page table of verify is off by a page": (
        "chain",
        (),
        of_verify("metadata.page_table = metadata.page_table.roll(1, 1)"),
        "target.hidden",
    ),
    "draft decode has the lengths of the step before": (
        "chain",
        (),
        edit(
            _FLASH_EAGER,
            "seqlens_in_batch + (self.speculative_step_id + 1)",
            "seqlens_in_batch + self.speculative_step_id",
        ),
        "draft.proposal",
    ),
    "the queries of verify are those of a shorter batch": (
        "chain",
        (),
        of_verify("metadata.cu_seqlens_q = metadata.cu_seqlens_q.clamp_max(metadata.cu_seqlens_q[-2])"),
        "target.hidden",
    ),
    "the nodes of verify are another request's": (
        "tree",
        (),
        edit(
            _FLASH_EAGER,
            "non_masked_page_table.gather(1, sort_order)",
            "non_masked_page_table.gather(1, sort_order).roll(self.speculative_num_draft_tokens, 0)",
        ),
        "target.hidden",
    ),
    "the nodes of draft decode are another branch's": (
        "tree",
        (),
        edit(
            f"{_FLASH}.draft_decode_set_expand_metadata",
            "(cache_loc // page_size)",
            "(cache_loc.roll(1, 0) // page_size)",
        ),
        "draft.proposal",
    ),
    "parts are merged without their sums": (
        "tree",
        (),
        edit(
            f"{_FLASH}.merge_state_v2_wrapper",
            "return merge_state_v2(o, s_a, o_exp, s_b)",
            "return merge_state_v2(o, s_a * 0, o_exp, s_b * 0)",
        ),
        "target.hidden",
    ),
    "a graph keeps the window's table of its capture": (
        "windows",
        _GRAPHS,
        edit(
            f"{_FLASH}.FlashAttentionBackend._set_decode_page_metadata",
            "metadata.swa_page_table,\n        full_to_swa",
            "None if metadata.swa_page_table is None else metadata.swa_page_table.clone(),\nfull_to_swa",
        ),
        "target.kv",
    ),
    "draft extend in a graph reads the pages of another request": (
        "chain",
        _GRAPHS,
        edit(
            f"{_FLASH}.FlashAttentionBackend.init_forward_metadata_in_graph",
            "req_pool_indices=forward_batch.req_pool_indices[:bs]",
            "req_pool_indices=forward_batch.req_pool_indices[:bs].flip(0)",
        ),
        "draft.hidden_in",
    ),
    "a graph keeps the mask of the tree before": (
        "tree",
        _GRAPHS,
        edit(_FLASH_GRAPHS, "metadata_expand.cache_seqlens_int32.copy_(mask.sum(dim=1))", "pass"),
        "target.hidden",
    ),
}


def flash_case(kind: str, graphs: tuple[int, ...], chain: Case, tree: Case) -> Case:
    case = chain if kind == "chain" else tree if kind == "tree" else batch_of(3, "gpt-oss-eagle3")
    return with_settings(replace(case, exercises=()), attention_backend="fa3", graphs=graphs)


@pytest.mark.parametrize("kind", ["chain", "tree", "windows"])
@pytest.mark.parametrize("graphs", [(), _GRAPHS])
def test_flash_attention_is_equal_as_released(
    run: Runner, busy_case: Case, busy_tree: Case, kind: str, graphs: tuple[int, ...]
) -> None:
    _, verdict = run(flash_case(kind, graphs, busy_case, busy_tree))
    assert (verdict.status, verdict.unseen) == ("equal", {})


@pytest.mark.parametrize("fault", spread(sorted(FLASH_PLANTED), lambda fault: FLASH_PLANTED[fault][:2]))
def test_a_fault_in_flash_attentions_metadata_is_named(run: Runner, busy_case: Case, busy_tree: Case, fault: str) -> None:
    kind, graphs, planted, rule = FLASH_PLANTED[fault]
    _, verdict = run(flash_case(kind, graphs, busy_case, busy_tree), planted)
    assert (verdict.status, verdict.rule) == ("diverged", rule)
