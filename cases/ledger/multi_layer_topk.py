"""Live, found by eagletwin, and the gravest: multi-layer EAGLE with topk > 1 emits wrong tokens.

SGLang accepts the combination and says nothing. Two things are missing that the single-layer worker has.

* After verify the accepted path is not moved to the front (PR #26997 did it for a single layer). If the path is not the first
  nodes of the tree, the request's next tokens are those that lie there, of nodes that were rejected, and so are the target's KV
  rows and the hidden states: the *output* changes.
* Between two layers each request's window is given one entry of a flat list of all proposals: request 1, with topk = 2, gets
  the second choice of request 0. That costs acceptance alone.

With three steps and more the server ends on a GPU, as the list of parents is too short (`multi-layer-topk-parents`).

`multi-layer-topk-path` shows the first, `multi-layer-topk-windows` the second; the remedy does both. What a tree of several
layers should be is not defined: the judge takes the tree that is verified as it is, and judges what verify makes of it.
"""

from ..entry import Entry, Needs, Request, small_case, small_patch

_FILE = "sglang.srt.speculative.multi_layer_eagle_worker_v2"
_DRAFTER = f"{_FILE}.MultiLayerEagleDraftWorker"

_TO_THE_FRONT = small_patch(
    "multi-layer-path", f"{_FILE}.MultiLayerEagleWorkerV2.verify", "finalize_tree_path=False", "finalize_tree_path=True"
)
_OWN_PROPOSAL = small_patch(  # after a prefill, outside graphs, between those of two layers, and inside the one of all layers
    "multi-layer-windows",
    "sglang.kernels.ops.speculative.multi_layer_eagle.rotate_input_ids",
    "if _is_cpu:",
    """if topk_index.ndim > 1:
    topk_index = topk_index[:, 0].contiguous()
if _is_cpu:""",
)


PATH = Entry(
    id="multi-layer-topk-path",
    title="Move the accepted path to the front after a multi-layer draft as well",
    rule="commit.path",
    buggy="0.5.16 -",  # before it the windows show first
    trigger="multi-layer EAGLE, topk > 1, num_steps >= 2, and a root's child that is not its first is accepted",
    remedy=_TO_THE_FRONT,
    case=small_case(
        Request(id="a", prompt=(7, 19, 3), max_new_tokens=5),
        model="llama-mtp",
        num_steps=2,
        topk=2,
        exercises=("tree", "path_not_in_front"),
    ),
)
WINDOWS = Entry(
    id="multi-layer-topk-windows",
    title="Move each request's window on by its own proposal",
    rule="draft.input_ids",
    buggy="0.5.13 -",
    trigger="multi-layer EAGLE, topk > 1, num_steps >= 2, and two requests in a batch",
    remedy=_OWN_PROPOSAL,
    behind=PATH,
    case=small_case(
        Request(id="a", prompt=(7,), max_new_tokens=2),
        Request(id="b", prompt=(9,), max_new_tokens=2),
        model="llama-mtp",
        num_steps=2,
        topk=2,
        exercises=("tree", "batch"),
    ),
)

PARENTS = Entry(
    id="multi-layer-topk-parents",
    title="Give each layer behind the first as many parents as it has branches",
    rule="engine.crash",
    buggy="0.5.21 -",
    trigger="a GPU, multi-layer EAGLE, topk > 1, num_steps >= 3",
    needs=Needs(device="cuda"),
    remedy=small_patch(
        "parents-of-all-layers",
        f"{_DRAFTER}._draft_forward_organize",
        "(tree_info[2].size(0), 1),",
        """# The stride of the tree kernels between requests is
# topk * (num_steps - 1) + 1.
(tree_info[2].size(0), self.topk),""",
    ),
    case=small_case(
        Request(id="a", prompt=(59,), max_new_tokens=5), model="llama-mtp", num_steps=3, topk=2, exercises=("tree",)
    ),
)

ENTRIES = (PATH, WINDOWS, PARENTS)
