"""Live, found by eagletwin on a GPU: with FlashAttention in graphs, a request at its context's end spoils the next request.

The table that tells verify where a request's KV rows lie has as many columns as the context is long. Verify needs one for each
row of the request and for each draft: near the end of the context more than that. From 0.5.15 to 0.5.21 what builds the table
stores them all the same, in the columns of the next request's row, which then attends to a stranger's rows: its *output*
changes (docs/findings/context-end.md). With overlap a request that is done takes part in one more round, so nearly every one
that ends there does it. In 0.5.22 and 0.5.23, as read, the stores end with the row and the table is as narrow as before.
Upstream: issue #34239, PR #35985 (open), which have it as an illegal access.

No CPU has FlashAttention: seen on an H200, in 0.5.17.
"""

from eagletwin.harness.core.case import Case, EngineSettings, Request, SGLangSettings
from eagletwin.harness.core.patch import Edit, Patch

from ..entry import Entry, Needs

ENTRY = Entry(
    id="context-end",
    title="Make the page tables of FlashAttention's graphs wide enough for drafts beyond the context",
    rule="target.hidden",
    buggy="0.5.15 -",
    fixed="",
    # a request's last round begins four tokens before the end of its context, or earlier; with overlap one more behind it
    trigger="FlashAttention in CUDA graphs, a request near its context's end; without overlap, 5 draft tokens",
    needs=Needs(device="cuda", dtype="bfloat16", attention="fa3", graphs=True, steady="--no-overlap"),
    remedy=Patch(
        name="wider-page-tables",
        edits=(
            # as wide as the rows of req_to_token that they are made of, which have room for drafts
            Edit(
                target="sglang.srt.layers.attention.flashattention_backend.FlashAttentionBackend.__init__",
                match="self.max_context_len = model_runner.model_config.context_len",
                replacement="self.max_context_len = model_runner.req_to_token_pool.req_to_token.shape[1]",
            ),
        ),
    ),
    # a is done after a round, b after three; in the third b, c and d begin at rows 11, 12 and 9, and take six each: those of
    # b and c reach into a fifth page, in a table of four. Two stores race for each first column, so which of c and d it hits
    # differs; two requests alone come out equal in some runs (docs/findings/context-end.md)
    case=Case(
        name="context-end",
        model="llama-tiny",
        num_steps=5,
        page_size=4,
        requests=(
            Request(id="a", prompt=(71, 1, 60, 83, 66, 38, 69, 53, 90), max_new_tokens=5),
            Request(id="b", prompt=(5, 47, 75, 77, 2, 28, 65, 41), max_new_tokens=6),
            Request(id="c", prompt=(74, 25, 26, 94, 82, 25, 5), max_new_tokens=7),
            Request(id="d", prompt=(28, 10, 83, 58, 2, 17), max_new_tokens=8),
        ),
        exercises=("draft_decode", "batch", "batch_shrinks"),
        engine=EngineSettings(sglang=SGLangSettings(context_length=16)),
    ),
)
