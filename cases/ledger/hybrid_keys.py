"""Live, found by eagletwin: where layers keep a state, keys of the prefix cache are single tokens with EAGLE, too.

The draft's row i consumes x[i+1], so a prefix x[0..p-1] ends at a row that was made of x[p]. For this reason keys are pairs of
tokens since PR #10846 (entry `10846`). Both cores of the unified cache leave that out where a tree has Mamba states: a state is
kept at p, and a key of p tokens has p - 1 pairs. A request that goes on from there with another token keeps the first one's row
p - 1 in its draft. So does one whose prefix was cached meanwhile: its own row is replaced by the cached one.

The remedy makes pairs, and gives a key one token more than it has rows, so that its rows end at the state. At the end of a
chunk that token is the prompt's next one. A state is not kept at the last token that a request has: the next is not known.

It does not say how a server `loses` by it: `acceptance` asks no server with such a model.
"""

from ..entry import Edit, Entry, Patch, Request, SGLangSettings, small_case

_SHARED = tuple(range(64))  # states are tracked every 64 tokens

ENTRY = Entry(
    id="hybrid-keys",
    title="Key the prefix cache in pairs with EAGLE where layers keep a state, too",
    rule="draft.kv",
    buggy="0.5.13 -",
    trigger="layers that keep a state (Qwen3-Next, Nemotron-H), the prefix cache, two prompts that part at a state",
    remedy=Patch(
        name="pairs-beside-states",
        edits=(
            Edit(
                target="sglang.srt.mem_cache.rust_tree_core.adapter.RustUnifiedTreeCore.__init__",
                match="params.is_eagle and ComponentType.MAMBA not in self.tree_components",
                replacement="params.is_eagle",
            ),
            Edit(
                target="sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.checkpoint_into_tree",
                match="radix_key = RadixKey(\n        token_ids[:effective_cache_len],",
                replacement="pairs = self.tree_core.is_eagle and self.supports_mamba()\n"
                "known = req.full_untruncated_fill_ids\n"
                "if pairs and effective_cache_len >= len(known):\n"
                "    effective_cache_len = 0\n"
                "radix_key = RadixKey(\n"
                "    known[: effective_cache_len + pairs],",
            ),
        ),
    ),
    case=small_case(
        Request(id="a", prompt=(*_SHARED, 70), max_new_tokens=1),
        Request(id="b", prompt=(*_SHARED, 80), max_new_tokens=2, arrive=4),
        model="qwen3-next-nextn",
        sglang=SGLangSettings(radix_cache=True),
    ),
)
