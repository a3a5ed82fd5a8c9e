"""Live, found by eagletwin: without pages, a round can be allotted more slots than a row of req_to_token has columns.

Twice the larger of topk * num_steps and num_draft_tokens is set aside for each request, and a row has num_draft_tokens + 4
columns more than the context (PR #26972 widened it for page_size > 1 alone). Near the end of its context a request's
slots run into the next request's row, which from then on reads a stranger's KV: its *output* changes, and the slots are never
freed, so that the scheduler's own check ends the server. With SGLang's default of 5 steps, topk 4 and 8 nodes any request that
comes within 27 tokens of its context length does this. docs/findings/row-overflow.md has the whole of it. The same in DFLASH:
issue #33579, PR #33581 (open).
"""

from ..entry import Edit, Entry, Patch, Request, SGLangSettings, small_case

ENTRY = Entry(
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
