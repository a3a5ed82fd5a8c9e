"""Live, found by eagletwin: an EAGLE-3 head with a draft window sees one row more in draft extend than in draft decode.

`--speculative-draft-window-size N` lets a Llama's EAGLE-3 head attend to the most recent N rows. SGLang gives N to its layers
as `sliding_window_size`, which the extend kernel of the Triton backend takes as how far back a row sees: its own row, and N
before it. Draft decode lists N rows, its own among them. Output is right; the head runs with another window than was asked for,
and than its next step.
"""

from ..entry import Entry, OnCuda, Request, SGLangSettings, small_case, small_patch

ENTRY = Entry(
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
        Request(id="a", prompt=(70, 25, 64), max_new_tokens=2),
        model="llama-eagle3",
        sglang=SGLangSettings(draft_window=2),
    ),
)
