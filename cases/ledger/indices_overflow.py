"""Live, found by eagletwin: at the end of the context, draft decode's list of KV slots is longer than its buffer's row.

The Triton backend gives each step a row of batch * topk * context_length entries. Step j attends to the committed tokens and j
rows of its own, so a batch whose requests are on the average less than num_steps from the context length writes past it: into
the next step's row, and past the buffer after the last. A request's last round begins four tokens before the end of its
context, or earlier, so it takes five steps. Related: issue #29695, PR #29696 (closed).

Compiled kernels do not say so; on a GPU a guard behind the buffer does (engines/sglang/kernels.py). Graphs share one buffer, as
wide as the largest batch needs, so there it takes a batch of that size.
"""

from ..entry import Entry, OnCuda, Request, SGLangSettings, small_case, small_patch

ENTRY = Entry(
    id="indices-overflow",
    title="Make draft decode's rows of KV indices wide enough for its own steps",
    rule="kernel.memory",
    buggy="0.5.12 -",
    trigger="num_steps >= 5 and the requests of a batch on the average less than num_steps from their context length",
    remedy=small_patch(
        "wider-indices",
        "sglang.srt.layers.attention.triton_backend.TritonMultiStepDraftBackend.__init__",
        "self.attn_backends[0].max_context_len",
        "self.attn_backends[0].max_context_len + speculative_num_steps",  # for graphs and without
    ),
    on_cuda=OnCuda(
        triton_alone="it is a bug of the Triton backend",
        modes=("one",),  # graphs for its own batch only
        hidden=dict.fromkeys(("graphs", "overlap"), "graphs share one buffer, as wide as their largest batch needs"),
    ),
    case=small_case(
        Request(id="a", prompt=(30, 75), max_new_tokens=12),
        num_steps=5,
        exercises=("draft_decode",),
        sglang=SGLangSettings(context_length=16),
    ),
)
