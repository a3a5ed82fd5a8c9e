"""Found by eagletwin on a GPU: in a graph of prefill Qwen3-Next's draft never sees the hidden states of the target.

Live in 0.5.23. A graph of prefill holds the body of a model, and the wrapper around it runs eagerly. The wrapper of this draft
joins embeddings and hidden states and hands them to the body, for which the runner has a slot in EAGLE-3's drafts and
multimodal models alone. Without the slot the body is captured with a look-up of embeddings, and what the wrapper hands over is
dropped: the draft's rows of every prompt are computed from tokens alone. Output is right. docs/findings/prefill-graph.

It does not say how a server `loses` by it: `acceptance` asks no server with such a model.
"""

from ..entry import Edit, Entry, Needs, OnCuda, Patch, Request, SGLangSettings, small_case

_RUNNER = "sglang.srt.model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner.__init__"
_HAS = "(self.is_multimodal or self._use_draft_input_embeds)"

# Whose wrappers hand their own input to the body, of those that eagletwin has.
FAMILIES = ("qwen3_next", "qwen3_5")

ENTRY = Entry(
    id="prefill-graph",
    title="Give the graph of a draft's prefill a slot for the input that its wrapper hands over",
    rule="draft.kv",
    buggy="0.5.23 -",
    trigger="graphs of prefill, a draft whose wrapper joins embeddings and hidden states (Qwen3-Next)",
    needs=Needs(prefill_graphs=True),
    on_cuda=OnCuda(modes=("prefill",)),
    remedy=Patch(
        name="slot-for-the-drafts-input",
        edits=tuple(
            Edit(target=_RUNNER, match=f"{name}={_HAS}", replacement=f"{name}=(self.is_multimodal or is_breakable_eagle_draft)")
            for name in ("enable_input_embeds", "register_input_embeds")
        ),
    ),
    case=small_case(
        # of fewer than half of the tokens that a graph is for, SGLang replays none
        Request(id="a", prompt=(30, 75, 12, 8, 51, 64, 3, 27, 90, 46), max_new_tokens=2),
        model="qwen3-next-nextn",
        sglang=SGLangSettings(graphs=(1, 2, 4), prefill_graphs=(16, 64)),
    ),
)
