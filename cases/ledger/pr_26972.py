"""PR #26972: with pages, a tree's round was allotted more slots than a row of req_to_token has columns.

Each branch takes whole pages, and twice that is set aside for every request; a row had room for the context and one verify.
Current releases look before they write, and die on an assertion; before that look the row of the next request was overwritten.
"""

from ..entry import Edit, Entry, Patch, Request, SGLangSettings, small_case

ENTRY = Entry(
    id="26972",
    title="Make a row of req_to_token wide enough for the pages of a tree",
    rule="engine.crash",
    buggy="0.5.9 - 0.5.12.post1",
    fixed="0.5.13",
    hidden="up to 0.5.12.post1 SGLang refuses trees with pages on the attention backend that runs on a CPU",
    trigger="topk > 1, page_size > 1, and 2 * topk * (pages of a branch) beyond the context length",
    revert=Patch(
        name="revert-26972",
        sglang_toggle=26972,
        otherwise=(  # 0.5.16 and 0.5.17, whose own text of the fix has moved on
            Edit(
                target="sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len",
                match="if server_args.speculative_algorithm is not None and server_args.page_size > 1:",
                replacement="if False:",
            ),
        ),
    ),
    case=small_case(
        Request(id="a", prompt=(7,), max_new_tokens=2),
        topk=2,
        num_draft_tokens=2,
        page_size=4,
        chunked_prefill_size=4,
        exercises=("tree",),
        sglang=SGLangSettings(context_length=8),
    ),
)
