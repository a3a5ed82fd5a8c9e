"""Live, found by eagletwin: with a hierarchical cache the rows of the first draft layer alone come back from the host.

A draft that is not packed behind the target's layers gets a pool on the host, for its first layer and no other. When the prefix
cache loads rows back, the other layers read whatever lies in their slots. Layers are packed where the draft's configuration has
`num_nextn_predict_layers`, as MiMo-V2's. It costs acceptance and never output. The remedy packs layers of any configuration.
In 0.5.21 it does not help: why was not looked for.
"""

from ..entry import Entry, Loses, Request, SGLangSettings, small_case, small_patch

ENTRY = Entry(
    id="host-layers",
    title="Load the rows of every draft layer back from the host",
    rule="draft.kv",
    buggy="0.5.21 -",
    trigger="multi-layer EAGLE with --enable-hierarchical-cache, and a draft without num_nextn_predict_layers",
    loses=Loses("prefix hits", layers=True, num_steps=2, needs="a host cache"),
    remedy=small_patch(
        "layers-packed-on-the-host",
        "sglang.srt.speculative.base_spec_worker._can_pack_hicache_mtp",
        "return is_nextn_mtp or is_dspark_dsv4",
        "return is_nextn_mtp or is_dspark_dsv4 or len(draft_runners) > 1",
    ),
    case=small_case(
        Request(id="a", prompt=tuple(range(1, 13)), max_new_tokens=1),
        Request(id="b", prompt=tuple(range(13, 68)), max_new_tokens=1, arrive=4),
        Request(id="c", prompt=tuple(range(1, 13)), max_new_tokens=1, arrive=8),
        model="llama-mtp",
        num_steps=2,
        sglang=SGLangSettings(radix_cache=True, max_total_tokens=64, host_pages=256, host_policy="write_back"),
    ),
)
