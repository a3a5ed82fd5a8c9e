"""Live, found by eagletwin: a request is aborted for want of memory that is only locked for its copy to the host.

With a hierarchical cache the rows of a request that ends are copied to the host, and locked until the scheduler learns, in an
iteration to come, that the copy is done. Where the pool is nearly full, nothing can be evicted until then. SGLang retracts all
requests but one, and aborts the last with status 500, "Out of memory even after retracting all other requests", though the pool
has room for it. The remedy waits for the copies before it gives the last one up. docs/findings/host-abort.
"""

from ..entry import Entry, Request, SGLangSettings, small_case, small_patch

_LAST = "if len(sorted_indices) <= 1 and not self.check_decode_mem("

ENTRY = Entry(
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
