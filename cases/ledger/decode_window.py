"""Live, reported as PR 32087 (closed, not merged): the Triton backend's decode reads one row less than a window has.

A layer's window is kept as how many rows a query sees before its own. Prefill and verify see those and their own; decode lists
as many rows as that number, its own among them, and so drops the oldest. The rounds of speculation run the target in verify
alone, so that the draft of Gemma-4 is where it shows: the assistant reads the target's rows in decode. Output is right there;
that of plain decode is not, in any model with windows.
"""

from ..entry import Edit, Entry, OnCuda, Patch, Request, SGLangSettings, small_case

ENTRY = Entry(
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
        Request(id="a", prompt=(70, 25, 64, 3, 9, 41, 17, 33, 8), max_new_tokens=6),
        model="gemma-4-assistant-window",
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
