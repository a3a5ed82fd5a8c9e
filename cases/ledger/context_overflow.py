"""Live, found by eagletwin: three bugs of rounds near the end of a context, which write past what was made for them.

`row-overflow`: without pages, a round can be allotted more slots than a row of req_to_token has columns.

Twice the larger of topk * num_steps and num_draft_tokens is set aside for each request, and a row has num_draft_tokens + 4
columns more than the context (PR #26972 widened it for page_size > 1 alone). Near the end of its context a request's
slots run into the next request's row, which from then on reads a stranger's KV: its *output* changes, and the slots are never
freed, so that the scheduler's own check ends the server. With SGLang's default of 5 steps, topk 4 and 8 nodes any request that
comes within 27 tokens of its context length does this. docs/findings/row-overflow has the whole of it. The same in DFLASH:
issue #33579, PR #33581 (open).

`indices-overflow`: at the end of the context, draft decode's list of KV slots is longer than its buffer's row.

The Triton backend gives each step a row of batch * topk * context_length entries. Step j attends to the committed tokens and j
rows of its own, so a batch whose requests are on the average less than num_steps from the context length writes past it: into
the next step's row, and past the buffer after the last. A request's last round begins four tokens before the end of its
context, or earlier, so it takes five steps. Related: issue #29695, PR #29696 (closed).

Compiled kernels do not say so; on a GPU a guard behind the buffer does (engines/sglang/kernels.py). Graphs share one buffer, as
wide as the largest batch needs, so there it takes a batch of that size.

`overlap-context-end`: with overlap a request that has ended behind its context is drafted for and verified once more.

The next round is launched before anybody has seen that the last one ended the request. A last round that begins in front of the
end of the context may commit num_steps tokens more than it holds, as the rows of req_to_token allow. The Triton backend takes
the context's length for the most that a request can have, and both what draft decode reads and the mask of the tree are made
for so many: they are written behind their end. docs/findings/overlap-context-end.

indices-overflow is the same list of slots, in the last round itself; pipeline-tail, in a pipeline's. This fix cures all three.
"""

from ..entry import Edit, Entry, Needs, OnCuda, Patch, Request, SGLangSettings, small_case, small_patch

ROW = Entry(
    id="row-overflow",
    title="Make a row of req_to_token wide enough for a tree without pages",
    rule="draft.slots",
    buggy="0.5.13 -",
    # a request's last round begins four tokens before the end of its context, or earlier
    trigger="page_size 1, 2 * max(topk * num_steps, num_draft_tokens) > num_draft_tokens + 8, a request near its context's end",
    remedy=Patch(
        name="wider-rows",
        edits=(
            Edit(
                target="sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len",
                match="if page_size > 1 or spec_algo.is_uno():",
                replacement="if True:",
            ),
        ),
        otherwise=(
            Edit(
                target="sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len",
                match="server_args.page_size > 1:",
                replacement="True:",
            ),
        ),
    ),
    case=small_case(
        Request(id="a", prompt=(7, 3, 5, 11, 2, 9, 4, 8, 1), max_new_tokens=5),
        Request(id="b", prompt=(9,), max_new_tokens=5),
        num_steps=2,
        topk=4,
        num_draft_tokens=3,
        exercises=("tree", "batch"),
        sglang=SGLangSettings(context_length=16),
    ),
)

INDICES = Entry(
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

# Its last round begins with 11 tokens and ends with 17, one more than its context holds.
OVERLAP = Entry(
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

ENTRIES = (ROW, INDICES, OVERLAP)
