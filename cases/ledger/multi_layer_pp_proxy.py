"""0.5.19 and 0.5.20: multi-layer EAGLE without overlap scheduling died of its first batch.

The scheduler hands every worker `pp_proxy_tensors` from 0.5.19 on when it does not overlap; the multi-layer worker takes the
argument from 0.5.21 on. With the overlap scheduler, the default on a GPU, it is not handed over.
"""

from ..entry import Edit, Entry, OnCuda, Patch, Request, small_case

_WORKER = "sglang.srt.speculative.multi_layer_eagle_worker_v2.MultiLayerEagleWorkerV2.forward_batch_generation"

ENTRY = Entry(
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
