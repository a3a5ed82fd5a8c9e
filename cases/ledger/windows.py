"""Live: four bugs of sliding windows on the Triton backend.

`draft-window`: an EAGLE-3 head with a draft window sees one row more in draft extend than in draft decode.

`--speculative-draft-window-size N` lets a Llama's EAGLE-3 head attend to the most recent N rows. SGLang gives N to its layers
as `sliding_window_size`, which the extend kernel of the Triton backend takes as how far back a row sees: its own row, and N
before it. Draft decode lists N rows, its own among them. Output is right; the head runs with another window than was asked for,
and than its next step.

`decode-window`, reported as PR 32087 (closed, not merged): the Triton backend's decode reads one row less than a window has.

A layer's window is kept as how many rows a query sees before its own. Prefill and verify see those and their own; decode lists
as many rows as that number, its own among them, and so drops the oldest. The rounds of speculation run the target in verify
alone, so that the draft of Gemma-4 is where it shows: the assistant reads the target's rows in decode. Output is right there;
that of plain decode is not, in any model with windows.

`tree-window`: verify of a tree counts a sliding window by a node's number, and the output is wrong.

A node at depth d stands d rows behind the bonus token. The Triton backend's extend kernel takes the node's number in the tree
for that. Node n of depth d then lacks n - d rows of the prefix, and ancestors whose numbers are more than a window before it.
In a chain number and depth are the same.

In the case the target predicts 52 at the end of the accepted path, where it says 39 by itself. The row that was stored for that
node is wrong as well, and is seen first.

`deterministic-window`: deterministic verify reads the mask of drafts at wrong places in layers with a sliding window.

With deterministic inference the Triton backend takes one kernel for prefix and drafts. A layer with a window gets the prefix
that is left of it, and the mask of the whole prefix. The kernel takes a row of the mask for as long as what is left: it
is then read at a wrong place, and a draft does not see rows that it should. A chain has a mask as well.

In the case the target predicts 71 at the bonus token, where it says 88 by itself.
"""

from ..entry import Edit, Entry, OnCuda, Patch, Request, SGLangSettings, small_case, small_patch

DRAFT = Entry(
    id="draft-window",
    title="Let an EAGLE-3 head see as many rows in draft extend as its window has",
    rule="draft.hidden_in",
    buggy="0.5.12 -",
    trigger="EAGLE-3 with --speculative-draft-window-size, the Triton backend, and a context longer than that",
    remedy=small_patch(
        "window-with-its-own-row",
        "sglang.srt.models.llama_eagle3.LlamaForCausalLMEagle3.__init__",
        "layer.self_attn.attn.sliding_window_size = self._draft_window_size",
        """# A layer's window is exclusive: how many rows a query sees
# before its own, as in other models (`config.sliding_window - 1`).
layer.self_attn.attn.sliding_window_size = self._draft_window_size - 1""",
    ),
    on_cuda=OnCuda(triton_alone="it is a bug of the Triton backend"),
    case=small_case(
        Request(id="a", prompt=(70, 25, 64), max_new_tokens=2), model="llama-eagle3", sglang=SGLangSettings(draft_window=2)
    ),
)

DECODE = Entry(
    id="decode-window",
    title="Let decode of the Triton backend read a whole window",
    rule="draft.proposal",
    buggy="0.5.12 -",
    trigger="a draft that reads the target's rows (Gemma-4's assistant), the Triton backend, a context longer than the window",
    remedy=Patch(
        name="window-with-its-own-row-in-decode",
        edits=(
            # what the others list too much, their kernel masks; the lists of a graph have room for as many rows
            Edit(
                target="sglang.srt.layers.attention.triton_backend.TritonAttnBackend.__init__",
                match="self.sliding_window_size = model_runner.sliding_window_size",
                replacement="self.sliding_window_size = model_runner.sliding_window_size\n"
                "if self.sliding_window_size:\n"
                "    self.sliding_window_size += 1",
            ),
            # else the oldest of these rows is freed before the round: the target's next row, M, does not see it
            Edit(
                target="sglang.srt.managers.schedule_batch.ScheduleBatch.maybe_evict_swa",
                match="req.seqlen - 1,",
                replacement="req.seqlen - 2,",
            ),
        ),
    ),
    on_cuda=OnCuda(triton_alone="it is a bug of the Triton backend"),
    case=small_case(
        Request(id="a", prompt=(70, 25, 64, 3, 9, 41, 17, 33, 8), max_new_tokens=6), model="gemma-4-assistant-window"
    ),
    also=(
        small_case(
            Request(id="a", prompt=(73, 10, 62, 33, 4, 0, 18, 84, 75), max_new_tokens=8),
            name="decode-window-plain",
            model="gpt-oss-eagle3",
            sglang=SGLangSettings(plain_decode=True),
        ),
    ),
)

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

TREE = Entry(
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

DETERMINISTIC = Entry(
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

ENTRIES = (DRAFT, DECODE, TREE, DETERMINISTIC)
