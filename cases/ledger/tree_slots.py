"""Live, found by eagletwin on a GPU: in trees with latent attention FlashAttention 3 reads the nodes' rows at wrong places.

Verify of a tree attends twice, to the committed rows and to the nodes. The table of the second call holds a slot of each node,
and the branch of latent attention hands it rows in pages: slot s is taken for page s. What is accepted may be wrong.
docs/findings/tree-slots.md.
"""

from ..entry import Entry, Needs, Request, small_case, small_patch

ENTRY = Entry(
    id="tree-slots",
    title="Read the rows of a tree's nodes with latent attention in pages of one",
    rule="commit.path",
    buggy="0.5.23 -",
    trigger="a GPU, --attention-backend fa3, latent attention (DeepSeek, Kimi K2), topk > 1, page_size > 1",
    needs=Needs(device="cuda", dtype="bfloat16", attention="fa3"),
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
    ),
)
