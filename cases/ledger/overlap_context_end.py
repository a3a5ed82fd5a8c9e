"""Live, found by eagletwin: with overlap a request that has ended behind its context is drafted for and verified once more.

The next round is launched before anybody has seen that the last one ended the request. A last round that begins in front of the
end of the context may commit num_steps tokens more than it holds, as the rows of req_to_token allow. The Triton backend takes
the context's length for the most that a request can have, and both what draft decode reads and the mask of the tree are made
for so many: they are written behind their end. docs/findings/overlap-context-end.

indices-overflow is the same list of slots, in the last round itself; pipeline-tail, in a pipeline's. This fix cures all three.
"""

from ..entry import Entry, Needs, OnCuda, Request, SGLangSettings, small_case, small_patch

# Its last round begins with 11 tokens and ends with 17, one more than its context holds.
ENTRY = Entry(
    id="overlap-context-end",
    title="Have the Triton backend count on as many rows as a row of req_to_token has",
    rule="kernel.memory",
    buggy="0.5.12 -",
    trigger="overlap, num_steps >= 5, and a batch whose requests a round with accepted drafts brings behind their context",
    needs=Needs(overlap=True),
    remedy=small_patch(
        "as-many-rows-as-req-to-token-has",
        "sglang.srt.layers.attention.triton_backend.TritonAttnBackend.__init__",
        "self.max_context_len = model_runner.model_config.context_len",
        """# The most rows a request can have. A round that ends a request may commit
# more than the context holds, and with overlap the next round is launched
# before that is seen; req_to_token has room for both.
self.max_context_len = model_runner.req_to_token_pool.req_to_token.shape[1]""",
    ),
    on_cuda=OnCuda(
        triton_alone="it is a bug of the Triton backend",
        modes=("one",),  # graphs for its own batch only
        hidden=dict.fromkeys(("graphs", "overlap"), "graphs share one buffer, as wide as their largest batch needs"),
    ),
    case=small_case(
        Request(id="a", prompt=(78,), max_new_tokens=13),
        num_steps=5,
        exercises=("draft_decode", "accept_all"),
        sglang=SGLangSettings(context_length=16),
    ),
)
