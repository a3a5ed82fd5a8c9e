"""Live, found by eagletwin: four bugs of draft trees.

`certain-node`: a node of which a tree's draft is certain is selected without its parent.

A candidate's value is its parent's times its own probability. Where that is 1 both have the same value, and SGLang selects with
torch.topk, which says nothing of the order of equal values: the child may be taken and its parent left out. The node is then
linked to nothing, and the tree has one less than it should. In a stable order a parent, whose number is smaller, comes first.

`tree-slots`: in trees with latent attention FlashAttention 3 reads the nodes' rows at wrong places.

Verify of a tree attends twice, to the committed rows and to the nodes. The table of the second call holds a slot of each node,
and the branch of latent attention hands it rows in pages: slot s is taken for page s. What is accepted may be wrong.
docs/explanation/latent-attention.md.

`tree-sinks`: in trees of gpt-oss FlashAttention 3 counts each sink twice.

Verify of a tree attends twice and merges the results by their sums. Both calls are given the sinks, and each sum has them: all
probabilities of layers without a window come out too small, also those of what is accepted: the *output* is wrong.

`small-tree`: a tree with fewer nodes than its longest path has kills the worker at its first verify.

Accepted paths are handed on in rows of num_steps + 1 entries, and moved to the front of blocks of num_draft_tokens. SGLang
raises num_draft_tokens of a chain to num_steps + 1, and leaves a tree's as it was asked for.
"""

from ..entry import Entry, Needs, Request, SGLangSettings, small_case, small_patch

_PROMPT = (
    79, 54, 67, 7, 84, 31, 36, 0, 1, 60, 44, 86, 16, 42, 2, 79, 53, 69, 12, 33, 70, 80, 2, 42, 42, 3, 79, 19, 29, 83,
    60,
)  # fmt: skip

CERTAIN = Entry(
    id="certain-node",
    title="Select a tree's nodes in a stable order, parents before children of the same value",
    rule="tree.parents",
    buggy="0.5.9 -",
    trigger="topk > 1, and a draft that is certain of a token: all others are below 6e-8",
    remedy=small_patch(
        "parents-first",
        "sglang.srt.speculative.eagle_utils.organize_draft_results",
        "top_scores_index = top_scores.indices",
        "in_order = score_list.sort(dim=-1, descending=True, stable=True).indices\n"
        "top_scores_index = in_order[:, : num_draft_token - 1]",
    ),
    case=small_case(
        Request(id="a", prompt=_PROMPT, max_new_tokens=2),
        model="deepseek-nextn-yarn",
        num_steps=3,
        topk=3,
        num_draft_tokens=6,
        exercises=("tree",),
    ),
)

SLOTS = Entry(
    id="tree-slots",
    title="Read the rows of a tree's nodes with latent attention in pages of one",
    rule="commit.path",
    buggy="0.5.23 -",
    trigger="--attention-backend fa3, latent attention (DeepSeek, Kimi K2), topk > 1, page_size > 1",
    recorded="what a node attends to is in its row and its logits alone",
    needs=Needs(attention="fa3"),
    remedy=small_patch(
        "nodes-are-slots",
        "sglang.srt.layers.attention.flashattention_backend.FlashAttentionBackend.forward_extend",
        "o, softmax_lse, *rest = result\n                    o_expand",
        "o, softmax_lse, *rest = result\nk_rope_cache, c_kv_cache = paged_view(k_rope, 1), paged_view(c_kv, 1)\no_expand",
    ),
    case=small_case(
        Request(id="a", prompt=(29, 47, 48), max_new_tokens=5),
        model="deepseek-nextn-wide",
        num_steps=2,
        topk=2,
        page_size=4,
        exercises=("tree",),
        sglang=SGLangSettings(attention_backend="fa3"),
    ),
)

SINKS = Entry(
    id="tree-sinks",
    title="Give the sinks of attention to one of the two calls that verify a tree",
    rule="commit.path",
    buggy="0.5.17 -",
    trigger="--attention-backend fa3, attention sinks (gpt-oss), topk > 1",
    needs=Needs(attention="fa3"),
    remedy=small_patch(
        "sinks-once",
        "sglang.srt.layers.attention.flashattention_backend.FlashAttentionBackend.forward_extend",
        "elif use_cascade_attn:\n            o_expand",
        """elif use_cascade_attn:
    kwargs.pop("sinks", None)  # the softmax of both calls together has one
    o_expand""",
    ),
    recorded="what a node attends to is in its row and its logits alone",
    case=small_case(
        Request(id="a", prompt=(0,), max_new_tokens=2),
        model="gpt-oss-eagle3",
        topk=2,
        exercises=("tree",),
        sglang=SGLangSettings(attention_backend="fa3"),
    ),
)

SMALL = Entry(
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

ENTRIES = (CERTAIN, SLOTS, SINKS, SMALL)
