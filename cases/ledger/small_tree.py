"""Live, found by eagletwin: a tree with fewer nodes than its longest path has kills the worker at its first verify.

Accepted paths are handed on in rows of num_steps + 1 entries, and moved to the front of blocks of num_draft_tokens. SGLang
raises num_draft_tokens of a chain to num_steps + 1, and leaves a tree's as it was asked for.
"""

from ..entry import Entry, Request, small_case, small_patch

ENTRY = Entry(
    id="small-tree",
    title="Let a tree have fewer nodes than num_steps + 1",
    rule="engine.crash",
    buggy="0.5.13 -",
    trigger="topk > 1 and num_draft_tokens < num_steps + 1",
    remedy=small_patch(
        "shorter-paths",
        "sglang.srt.speculative.eagle_worker_common._compact_accept_to_front",
        "s1 = accept_index.shape[1]",
        "accept_index = accept_index[:, :nd]\ns1 = accept_index.shape[1]",
    ),
    case=small_case(
        Request(id="a", prompt=(7,), max_new_tokens=4), num_steps=2, topk=2, num_draft_tokens=2, exercises=("tree",)
    ),
)
