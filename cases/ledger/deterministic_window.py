"""Live, found by eagletwin: deterministic verify reads the mask of drafts at wrong places in layers with a sliding window.

With deterministic inference the Triton backend takes one kernel for prefix and drafts. A layer with a window gets the prefix
that is left of it, and the mask of the whole prefix. The kernel takes a row of the mask for as long as what is left: it
is then read at a wrong place, and a draft does not see rows that it should. A chain has a mask as well.

In the case the target predicts 71 at the bonus token, where it says 88 by itself.
"""

from ..entry import Edit, Entry, OnCuda, Patch, Request, SGLangSettings, small_case

_UNIFIED = "sglang.srt.layers.attention.triton_backend.TritonAttnBackend._forward_extend_unified"

# A mask of the rows that are left, copied for each layer by operations of fixed sizes, which a CUDA graph can hold.
# The patch in docs/findings/deterministic-window counts the whole rows in the kernel instead, and copies nothing.
_MASK_OF_WINDOW = """custom, starts = self.forward_metadata.custom_mask, self.forward_metadata.mask_indptr
if custom is not None and sliding_window_size > 0 and window_start_pos is not None:
    first, left = window_start_pos[:bs].long(), (prefix_lens[:bs] + extend_seq_lens[:bs]).long()
    ends = torch.cumsum(extend_seq_lens[:bs] * left, 0)
    begins = torch.nn.functional.pad(ends, (1, 0))
    place = torch.arange(custom.numel(), device=custom.device)
    of = torch.searchsorted(ends, place, right=True).clamp(max=bs - 1)
    row, column = (place - begins[of]) // left[of], (place - begins[of]) % left[of]
    custom = custom[(starts[of] + row * (first + left)[of] + first[of] + column).clamp(max=custom.numel() - 1)]
    starts = begins.to(starts.dtype)
# Call unified kernel"""

ENTRY = Entry(
    id="deterministic-window",
    title="Read the mask of drafts behind the window's start in deterministic inference",
    rule="target.kv",
    buggy="0.5.13 -",
    trigger="--enable-deterministic-inference, the Triton backend, and a target with sliding windows (gpt-oss, MiMo-V2)",
    remedy=Patch(
        name="mask-of-the-window",
        edits=(
            Edit(target=_UNIFIED, match="# Call unified kernel", replacement=_MASK_OF_WINDOW),
            Edit(target=_UNIFIED, match="custom_mask=self.forward_metadata.custom_mask,", replacement="custom_mask=custom,"),
            Edit(target=_UNIFIED, match="mask_indptr=self.forward_metadata.mask_indptr,", replacement="mask_indptr=starts,"),
        ),
    ),
    on_cuda=OnCuda(triton_alone="it is a bug of the Triton backend"),
    case=small_case(
        Request(id="a", prompt=(80, 48, 43, 79, 82, 50, 67, 64, 86, 20), max_new_tokens=2),
        model="gpt-oss-eagle3",
        sglang=SGLangSettings(deterministic=True),
    ),
)
