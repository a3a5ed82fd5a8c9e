"""Live, found by eagletwin: verify of a tree counts a sliding window by a node's number, and the output is wrong.

A node at depth d stands d rows behind the bonus token. The Triton backend's extend kernel takes the node's number in the tree
for that. Node n of depth d then lacks n - d rows of the prefix, and ancestors whose numbers are more than a window before it.
In a chain number and depth are the same.

In the case the target predicts 52 at the end of the accepted path, where it says 39 by itself. The row that was stored for that
node is wrong as well, and is seen first.
"""

from ..entry import Edit, Entry, OnCuda, Patch, Request, small_case

_FORWARD = "sglang.srt.layers.attention.triton_backend.TritonAttnBackend.forward_extend"

# The window of each path goes into the mask, and the layer's own is made wide enough to cut nothing, for both of the backend's
# kernels. All of it stays on the device, so that a CUDA graph can hold it. A copy of the mask for each layer is slow: the patch
# in docs/findings/tree-window hands positions to the kernel instead.
_WINDOW_IN_MASK = """import copy, dataclasses
by_mask, window = {}, layer.sliding_window_size or -1
self.forward_metadata = whole = getattr(self.forward_metadata, "whole", self.forward_metadata)
if window > 0 and whole.custom_mask is not None and forward_batch.forward_mode.is_target_verify():
    mask, width, count = whole.custom_mask, self.num_draft_tokens, forward_batch.batch_size
    begins, place = whole.mask_indptr[:count].long(), torch.arange(whole.custom_mask.numel(), device=whole.custom_mask.device)
    owner = torch.searchsorted(begins, place, right=True) - 1
    columns = forward_batch.seq_lens[:count].long()[owner] + width
    last = place - (place - begins[owner]) % columns + columns - 1
    seen = mask.long().cumsum(0)
    newer = seen[last.clamp(max=mask.numel() - 1)] - seen + mask.long()
    in_window = (mask.bool() & (newer <= window + 1)).to(mask.dtype)
    self.forward_metadata = dataclasses.replace(whole, custom_mask=in_window)
    self.forward_metadata.whole = whole
    layer, by_mask = copy.copy(layer), {"skip_prefix_custom_mask": False}
    layer.sliding_window_size = window + width
"""
_EITHER_KERNEL = "if self.enable_deterministic:"

ENTRY = Entry(
    id="tree-window",
    title="Count the window of a tree's node by its depth",
    rule="commit.path",
    buggy="0.5.13 -",
    trigger="topk > 1, the Triton backend, and a target with sliding windows (gpt-oss, MiMo-V2)",
    remedy=Patch(
        name="window-of-a-path",
        edits=(
            Edit(target=_FORWARD, match=_EITHER_KERNEL, replacement=_WINDOW_IN_MASK + _EITHER_KERNEL),
            Edit(
                target=_FORWARD,
                match="extend_seq_lens_cpu=forward_batch.extend_seq_lens_cpu,",
                replacement="extend_seq_lens_cpu=forward_batch.extend_seq_lens_cpu,\n**by_mask,",
            ),
        ),
    ),
    on_cuda=OnCuda(triton_alone="it is a bug of the Triton backend"),
    recorded="what a node attends to is in its row and its logits alone",
    case=small_case(
        Request(id="a", prompt=(49, 53, 5, 33, 65), max_new_tokens=5),
        model="gpt-oss-eagle3",
        num_steps=3,
        topk=3,
        num_draft_tokens=8,
        exercises=("tree", "path_not_in_front"),
    ),
)
