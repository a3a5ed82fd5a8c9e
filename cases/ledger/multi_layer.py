"""Bugs of the multi-layer worker.

`multi-layer-plan`, 0.5.13 to 0.5.15.post1: without CUDA graphs, attention of a multi-layer draft's decode ran with the plan of
an earlier forward.

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

`multi-layer-chunk-tail-2` and `multi-layer-chunk-tail-3`, live: a multi-layer draft consumes wrong tokens at the end of a
prefill chunk that is not the last.

PR #26329 for several layers: at a chunk that ends at K the worker puts the target's argmax where layer 0 must consume x[K],
though the scheduler has handed it that token; a comment in the worker says so. And each layer's window is that of the layer
below, moved on by one, with what the layer below proposed at its end. So layer k has k + 1 wrong rows at each chunk's end:
K-1-k..K-1 must consume x[K..K+k]. The next chunk begins at K, so they stay wrong for as long as the request lives, and in the
prefix cache after it.

To give layer 0 its token is not enough: layer k needs x[K..K+k]. ONE_TOKEN is the fix of #26329 carried over; ALL_LAYERS looks
all of them up. Where the prompt ends inside the window the token is not known yet: the draft of the layer below stands in for
it, as at the end of the prompt, and the row is provisional (entry boundary-kv).

`chain-hidden`, up to 0.5.10.post1: without CUDA graphs, the layers of a chained draft were fed the target's state in decode.

In a chained model (Step-3.5) a layer consumes the state of the layer below. PR #18564 saw to it in prefill and in graphs;
draft extend without a graph handed every layer the target's, until 0.5.11. Which of the two a batch met depended on its size.

`boundary-kv`, live and declared: rows of a multi-layer draft that were fed a draft keep it when verify rejects it (boundary
KV).

Layer k looks k tokens ahead, so at each extend its last k rows consume drafts. The next extend begins behind them, whatever
verify said. SGLang repairs this for hybrid models (SGLANG_ENABLE_MTP_BOUNDARY_KV_FIX, since 0.5.16) and for no others. It costs
acceptance and never output. The judge declares it (DESIGN 3.7) and follows `last_fed`; this entry shows that `committed` is
another thing. The same in vLLM: issue #14649 (open).
"""

from collections.abc import Mapping

from ..entry import IN_A_GRAPH, Edit, Entry, Loses, OnCuda, Patch, Request, small_case, small_patch
from .pr_22954 import EACH_ITS_OWN

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

_PREFILL = f"{_FILE}.MultiLayerEagleDraftWorker._draft_extend_for_prefill"

# Before the layers run: what follows the chunk, as far as the prompt goes; after a retraction that is all there is. A chunk is
# empty where the tokens of requests that run fill a mixed one.
_LOOK_UP = """ahead, chunked = [], batch.chunked_req
row = next((n for n, req in enumerate(batch.reqs) if req is chunked), None)
if row is not None:
    known = [*chunked.origin_input_ids, *chunked.output_ids]
    end = chunked.extend_end if hasattr(chunked, "extend_end") else chunked.extend_range.end
    ahead = known[end : end + self.speculative_num_steps]
if ahead and forward_batch.extend_seq_lens_cpu[row] > 0:
    tail = forward_batch.extend_start_loc[row] + forward_batch.extend_seq_lens[row] - 1
    forward_batch.input_ids[tail] = ahead[0]
"""
_FIRST_LAYER = Edit(
    target=_PREFILL, match="self._seed_boundary_kv_stash(", replacement=f"{_LOOK_UP}self._seed_boundary_kv_stash("
)
# Before the window is moved on for the next layer. What was proposed is kept as it was.
_NEXT_LAYERS = Edit(
    target=_PREFILL,
    match="if forward_batch.extend_seq_lens is not None:",
    replacement="""if step + 1 < len(ahead):
    topk_index = topk_index.clone()
    topk_index[row] = ahead[step + 1]
if forward_batch.extend_seq_lens is not None:""",
)

ONE_TOKEN = Patch(name="one-tail-token", edits=(_FIRST_LAYER,))
ALL_LAYERS = Patch(name="tail-tokens-of-all-layers", edits=(_FIRST_LAYER, _NEXT_LAYERS))


def _tail(layers: int, model: str, prompt: tuple[int, ...], chunk: int) -> Entry:
    return Entry(
        id=f"multi-layer-chunk-tail-{layers}",
        title=f"Give each of {layers} layers the tokens that follow the chunk",
        rule="draft.input_ids",
        buggy="0.5.9 -",
        trigger="multi-layer EAGLE, and a prompt in two chunks or more that goes on otherwise than predicted",
        loses=Loses("prompts longer than a chunk", layers=True, num_steps=layers),
        remedy=ALL_LAYERS,
        case=small_case(
            Request(id="a", prompt=prompt, max_new_tokens=2),
            model=model,
            num_steps=layers,
            chunked_prefill_size=chunk,
            exercises=("chunked_prefill", "chunk_tail_differs"),
        ),
    )


TWO = _tail(2, "llama-mtp", (7, 19, 3, 5), 2)
THREE = _tail(3, "llama-mtp-chain", (7, 19, 3, 5, 11, 2), 3)

CHAIN_HIDDEN = Entry(
    id="chain-hidden",
    title="Hand the state of the layer below on in decode without graphs",
    rule="draft.hidden_in",
    buggy="0.5.9 - 0.5.10.post1",
    fixed="0.5.11",
    last_bad="0.5.10.post1",
    beside={"0.5.10.post1": EACH_ITS_OWN, "0.5.11": EACH_ITS_OWN},  # all layers share layer 0's KV pool there
    trigger="a chained multi-layer draft, num_steps >= 2, and a batch that no CUDA graph was captured for",
    loses=Loses("always", layers=True, num_steps=2),
    revert=small_patch(
        "revert-chain-hidden",
        f"{_FILE}.MultiLayerEagleDraftWorker._draft_extend_for_decode",
        "self.chain_mtp_hidden_states\n",
        "False\n",
    ),
    on_cuda=OnCuda(hidden=IN_A_GRAPH),
    case=small_case(Request(id="a", prompt=(7,), max_new_tokens=2), model="llama-mtp-chain", num_steps=2),
)

BOUNDARY_KV = Entry(
    id="boundary-kv",
    title="Rewrite the rows of layers 1.. that were fed a draft which verify rejected",
    rule="draft.kv",
    buggy="0.5.9 -",
    trigger="multi-layer EAGLE without a hybrid model, num_steps >= 2, a draft that is rejected",
    loses=Loses("always", layers=True, num_steps=2),
    view="committed",
    case=small_case(
        Request(id="a", prompt=(9,), max_new_tokens=4), model="llama-mtp", num_steps=2, exercises=("look_ahead_rejected",)
    ),
)

ENTRIES = (
    _entry("verify", "Plan the attention of target verify", "target.hidden", {}),
    _entry("extend", "Plan the attention of each layer's draft extend", "draft.proposal", {"0.5.15.post1": _PLAN_VERIFY}),
    PP_PROXY,
    TWO,
    THREE,
    CHAIN_HIDDEN,
    BOUNDARY_KV,
)
