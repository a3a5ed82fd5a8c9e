"""Found by eagletwin: five bugs of rounds near the end of a context, which write or read past what was made for them.
All are live but `context-end-stores`.

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

With FlashAttention in CUDA graphs, a request at its context's end disturbs the next request. The table that tells verify where
a request's KV rows lie has as many columns as the context is long. Verify needs one for each row of the request and for each
draft: near the end of the context more than that.

* `context-end-stores`, 0.5.15 to 0.5.21: what builds the table stores them all the same, in the columns of the next request's
  row, which then attends to a stranger's rows: its *output* changes. From 0.5.22 on the stores end with the row.
* `context-end-reads`, live: FlashAttention still reads as many columns as there are rows, so drafts beyond the context attend
  to the rows that the next request's row of the table names, in draft decode, verify and draft extend. None of them is ever
  emitted. For the last row of the table, as of a graph for one request, the reads are out of bounds: an illegal memory access
  ends the *server*.

Upstream: issue #34239, PR #35985 (open), which have it as an illegal access. docs/findings/context-end-reads has both.

Seen on an H200, in 0.5.17 and 0.5.23, and on a CPU.
"""

from dataclasses import replace

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

_BACKEND = "sglang.srt.layers.attention.flashattention_backend.FlashAttentionBackend"
_READS_FIRST = "context-end-reads shows in each case of it, and its remedy mends both"

WIDER = small_patch(
    "wider-page-tables",
    f"{_BACKEND}.__init__",
    "self.max_context_len = model_runner.model_config.context_len",
    """# Page tables are made of rows of req_to_token, and are as wide: near the end
# of its context a request's drafts, which verify and draft extend attend to,
# lie beyond context_len.
self.max_context_len = model_runner.req_to_token_pool.req_to_token.shape[1]""",
)

# a is done after a round, b after three; in the third b, c and d begin at rows 11, 12 and 9, and take six each: those of b and
# c reach into a fifth page, in a table of four. Two stores race for each first column, so which of c and d it hits differs; two
# requests alone come out equal in some runs
_FOUR = small_case(
    Request(id="a", prompt=(71, 1, 60, 83, 66, 38, 69, 53, 90), max_new_tokens=5),
    Request(id="b", prompt=(5, 47, 75, 77, 2, 28, 65, 41), max_new_tokens=6),
    Request(id="c", prompt=(74, 25, 26, 94, 82, 25, 5), max_new_tokens=7),
    Request(id="d", prompt=(28, 10, 83, 58, 2, 17), max_new_tokens=8),
    name="context-end",
    num_steps=5,
    page_size=4,
    exercises=("draft_decode", "batch", "batch_shrinks"),
    sglang=SGLangSettings(context_length=16),
)


_NEEDS = Needs(attention="fa3", graphs=True)


STORES = Entry(
    id="context-end-stores",
    title="End the stores into FlashAttention's page tables with a request's own row",
    rule="target.hidden",
    buggy="0.5.15 - 0.5.21",
    fixed="0.5.22",
    hidden=_READS_FIRST,
    # a request's last round begins four tokens before the end of its context, or earlier; with overlap one more behind it
    trigger="FlashAttention in CUDA graphs, a request near its context's end; without overlap, 5 draft tokens",
    needs=replace(_NEEDS, device="cuda", dtype="bfloat16", overlap=False),
    # how many columns may be stored; the row has as many as before
    revert=small_patch(
        "revert-context-end-stores", f"{_BACKEND}._set_decode_page_metadata", "self.max_num_pages,", "self.max_num_pages + 2,"
    ),
    on_cuda=OnCuda(green=(WIDER,), red=(), until="0.5.21"),
    case=_FOUR,
)

READS = Entry(
    id="context-end-reads",
    title="Make the page tables of FlashAttention's graphs wide enough for drafts beyond the context",
    rule="draft.proposal",
    buggy="0.5.15 -",
    trigger="FlashAttention in CUDA graphs, 5 draft tokens, a request near its context's end",
    needs=replace(_NEEDS, overlap=True),
    remedy=WIDER,
    # with overlap a round begins at row 13 or behind, whatever was accepted before: its draft decode comes to a 17th column
    case=small_case(
        Request(id="a", prompt=(41, 63, 60, 14, 3, 39, 49, 43, 53), max_new_tokens=5),
        num_steps=5,
        exercises=("draft_decode",),
        sglang=SGLangSettings(context_length=16, attention_backend="fa3", graphs=(1, 2, 4), overlap=True),
    ),
)

ENTRIES = (ROW, INDICES, OVERLAP, STORES, READS)
