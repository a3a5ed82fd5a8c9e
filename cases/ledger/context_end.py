"""Found by eagletwin on a GPU: with FlashAttention in CUDA graphs, a request at its context's end disturbs the next request.

The table that tells verify where a request's KV rows lie has as many columns as the context is long. Verify needs one for each
row of the request and for each draft: near the end of the context more than that.

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

from ..entry import Entry, Needs, OnCuda, Request, SGLangSettings, small_case, small_patch

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

ENTRIES = (STORES, READS)
