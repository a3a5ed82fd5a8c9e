"""Live, found by eagletwin: two bugs of a hierarchical cache, which copies rows to the host and back.

`host-abort`: a request is aborted for want of memory that is only locked for its copy to the host.
With a hierarchical cache the rows of a request that ends are copied to the host, and locked until the scheduler learns, in an
iteration to come, that the copy is done. Where the pool is nearly full, nothing can be evicted until then. SGLang retracts all
requests but one, and aborts the last with status 500, "Out of memory even after retracting all other requests", though the pool
has room for it. The remedy waits for the copies before it gives the last one up. docs/findings/host-abort.

`host-layers`: with a hierarchical cache the rows of the first draft layer alone come back from the host.
A draft that is not packed behind the target's layers gets a pool on the host, for its first layer and no other. When the prefix
cache loads rows back, the other layers read whatever lies in their slots. Layers are packed where the draft's configuration has
`num_nextn_predict_layers`, as MiMo-V2's. It costs acceptance and never output. The remedy packs layers of any configuration.
In 0.5.21 it does not help: why was not looked for.
"""

from ..entry import Entry, Loses, Request, SGLangSettings, small_case, small_patch

_LAST = "if len(sorted_indices) <= 1 and not self.check_decode_mem("

ABORT = Entry(
    id="host-abort",
    title="Wait for copies to the host before the last request is given up",
    rule="schedule.events",
    buggy="0.5.21 -",
    trigger="--enable-hierarchical-cache, and a request that ends beside another one in a pool they nearly fill",
    remedy=small_patch(
        "copies-are-awaited",
        "sglang.srt.managers.schedule_batch.ScheduleBatch.retract_decode",
        _LAST,
        f"{_LAST}selected_indices=sorted_indices):\n"
        '    if hasattr(self.tree_cache, "writing_check"):\n'
        f"        self.tree_cache.writing_check(write_back=True)\n{_LAST}",
    ),
    case=small_case(
        Request(id="a", prompt=tuple(range(1, 38)), max_new_tokens=1),
        Request(id="b", prompt=tuple(range(38, 58)), max_new_tokens=3),
        num_steps=4,
        sglang=SGLangSettings(radix_cache=True, max_total_tokens=64, host_pages=256),
    ),
)


LAYERS = Entry(
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

ENTRIES = (ABORT, LAYERS)
