"""PR #22958: in a CUDA graph of a multi-layer draft extend, padded rows keep what an earlier, larger batch left in the buffers.

A padded row writes the row that its slot names. A request that moved up in the batch left its last slots in that row, and so
its committed rows are written again, from tokens that the layers rotated since. Reported and proposed for 0.5.10.post1, closed
without being merged, and since 0.5.15 `prepare` resets the rows.

Triton's kernel does. Its twin in torch, which an NPU takes from 0.5.17 on, leaves slots, positions and tokens of padded rows
as they are; undoing the fix takes it. Neither resets `req_pool_indices` of these rows: with a length of 1 such a row reads one
slot, and its output is dropped, so no number differs.
"""

from ..entry import Entry, Needs, OnCuda, Request, SGLangSettings, small_case, small_patch

_COMPOSITE = "multi_layer_eagle_draft_extend_cuda_graph_runner.MultiLayerEagleMultiStepDraftExtendCudaGraphRunner"

ENTRY = Entry(
    id="22958",
    title="Reset the padded rows of a multi-layer draft extend in a CUDA graph",
    rule="draft.kv",
    buggy="0.5.9 - 0.5.14",
    fixed="0.5.15",
    hidden="reset_buffers() resets slots, positions, tokens and lengths before; what stays stale, the requests' indices, "
    "changes no number",
    trigger="multi-layer EAGLE, and a CUDA graph for more requests than the batch has, after a larger batch",
    needs=Needs(graphs=True),
    on_cuda=OnCuda(triton_alone="FlashAttention's metadata is staged before, and staging resets the padded slots"),
    revert=small_patch(
        "revert-22958",
        f"sglang.srt.speculative.{_COMPOSITE}.prepare",
        "fill_draft_extend_prepare_buffers(",
        """from sglang.srt.speculative.multi_layer_eagle_utils import fill_draft_extend_prepare_buffers_native
fill_draft_extend_prepare_buffers_native(""",
    ),
    case=small_case(
        Request(id="a", prompt=(7,), max_new_tokens=2),
        Request(id="b", prompt=(30,), max_new_tokens=4),
        Request(id="c", prompt=(51,), max_new_tokens=3),
        Request(id="d", prompt=(64,), max_new_tokens=4),
        model="llama-mtp",
        num_steps=2,
        sglang=SGLangSettings(graphs=(1, 2, 4)),
        exercises=("batch_shrinks",),
    ),
)
