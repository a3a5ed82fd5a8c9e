"""Two bugs of the multi-layer worker.

0.5.13 to 0.5.15.post1: without CUDA graphs, attention of a multi-layer draft's decode ran with the plan of an earlier
forward.

From 0.5.13 on each runner's forward asks its own attention backend, whose plan (`forward_metadata`: which KV rows each query
attends to) must be made for the batch at hand. The worker said that it was made, and it was not:

* `multi-layer-plan-verify`: before target verify. Verify ran with the plan of the last prefill, or of the last verify.
* `multi-layer-plan-extend`: before draft extend, where runner 0's was made and no other's.

What a query attends to is then another forward's, the number of rows too, so kernels also store outside their tensors. Graphs
plan in another place and were right.

The lines of draft extend are as old as the worker, and were right while attention asked the batch for its backend, which was
runner 0's for all layers (up to 0.5.12.post1, entry 22954-attn-backend): that one's plan was made.

`multi-layer-pp-proxy`: 0.5.19 and 0.5.20: multi-layer EAGLE without overlap scheduling died of its first batch.

The scheduler hands every worker `pp_proxy_tensors` from 0.5.19 on when it does not overlap; the multi-layer worker takes the
argument from 0.5.21 on. With the overlap scheduler, the default on a GPU, it is not handed over.
"""

from collections.abc import Mapping

from ..entry import IN_A_GRAPH, Edit, Entry, Loses, OnCuda, Patch, Request, small_case, small_patch

_FILE = "sglang.srt.speculative.multi_layer_eagle_worker_v2"
_REVERTS = {
    "verify": (
        Edit(
            target=f"{_FILE}.MultiLayerEagleWorkerV2.verify",
            match="metadata_ready_pre_pad=False",
            replacement="metadata_ready_pre_pad=True",
        ),
        Edit(  # where a later release looks again
            target="sglang.srt.model_executor.runner.eager_runner.EagerRunner._execute_extend",
            match="or forward_batch.forward_mode.is_target_verify()",
            replacement="or False",
        ),
    ),
    "extend": (
        Edit(
            target=f"{_FILE}.MultiLayerEagleDraftWorker._draft_extend_for_decode",
            match="if not forward_batch.forward_mode.is_idle():",
            replacement="forward_batch.mark_forward_metadata_ready()\nif step == 0:",
        ),
    ),
}


# 0.5.16 and 0.5.17, where no later code looks again, and each layer's plan is made in the worker.
_REVERTS_BEFORE = {
    "verify": _REVERTS["verify"][:1],
    "extend": (
        Edit(
            target=f"{_FILE}.MultiLayerEagleDraftWorker._draft_extend_for_decode",
            match="self.draft_runner_list[step].attn_backend.init_forward_metadata(",
            replacement="""forward_batch.mark_forward_metadata_ready()
if step == 0: self.draft_runner_list[step].attn_backend.init_forward_metadata(""",
        ),
    ),
}


# Of 0.5.13 to 0.5.15.post1, whose verify comes first and is as wrong.
_PLAN_VERIFY = small_patch(
    "plan-verify", f"{_FILE}.MultiLayerEagleWorkerV2.verify", "verify_forward_batch.mark_forward_metadata_ready()", "pass"
)


def _entry(part: str, title: str, rule: str, beside: Mapping[str, Patch]) -> Entry:
    return Entry(
        id=f"multi-layer-plan-{part}",
        title=title,
        rule=rule,
        buggy="0.5.13 - 0.5.15.post1",
        fixed="0.5.16",
        last_bad="0.5.15.post1",
        beside=beside,
        trigger="multi-layer EAGLE without CUDA graphs, or with a batch that no graph was captured for",
        loses=Loses("always", layers=True, num_steps=2) if part == "extend" else None,
        revert=Patch(name=f"revert-multi-layer-plan-{part}", edits=_REVERTS[part], otherwise=_REVERTS_BEFORE[part]),
        on_cuda=OnCuda(hidden=IN_A_GRAPH),
        case=small_case(
            # as many tokens as a round has rows: with the plan of fewer, rows of the output are never written, and say anything
            Request(id="a", prompt=(5, 60, 33), max_new_tokens=2),
            model="llama-mtp",
            num_steps=2,
        ),
    )


_WORKER = f"{_FILE}.MultiLayerEagleWorkerV2.forward_batch_generation"

PP_PROXY = Entry(
    id="multi-layer-pp-proxy",
    title="Let the multi-layer worker take the scheduler's pp_proxy_tensors",
    rule="engine.crash",
    buggy="0.5.19 - 0.5.20",
    fixed="0.5.21",
    last_bad="0.5.20",
    trigger="multi-layer EAGLE with the overlap scheduler off",
    revert=Patch(
        name="revert-multi-layer-pp-proxy",
        edits=(
            Edit(target=_WORKER, match="pp_proxy_tensors=None,", replacement=""),
            Edit(target=_WORKER, match="pp_proxy_tensors=pp_proxy_tensors,", replacement="pp_proxy_tensors=None,"),
        ),
    ),
    on_cuda=OnCuda(hidden={"overlap": "with overlap the scheduler does not hand the argument over"}),
    case=small_case(Request(id="a", prompt=(7,), max_new_tokens=1), model="llama-mtp"),
)

ENTRIES = (
    _entry("verify", "Plan the attention of target verify", "target.hidden", {}),
    _entry("extend", "Plan the attention of each layer's draft extend", "draft.proposal", {"0.5.15.post1": _PLAN_VERIFY}),
    PP_PROXY,
)
