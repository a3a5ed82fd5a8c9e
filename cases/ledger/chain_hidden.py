"""Up to 0.5.10.post1: without CUDA graphs, the layers of a chained draft were fed the target's state in decode.

In a chained model (Step-3.5) a layer consumes the state of the layer below. PR #18564 saw to it in prefill and in graphs;
draft extend without a graph handed every layer the target's, until 0.5.11. Which of the two a batch met depended on its size.
"""

from ..entry import IN_A_GRAPH, Entry, Loses, OnCuda, Request, small_case, small_patch
from .pr_22954 import EACH_ITS_OWN

ENTRY = Entry(
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
        "sglang.srt.speculative.multi_layer_eagle_worker_v2.MultiLayerEagleDraftWorker._draft_extend_for_decode",
        "self.chain_mtp_hidden_states\n",
        "False\n",
    ),
    on_cuda=OnCuda(hidden=IN_A_GRAPH),
    case=small_case(Request(id="a", prompt=(7,), max_new_tokens=2), model="llama-mtp-chain", num_steps=2),
)
