"""PR #29354: a request that had to wait began from a state of the prefix cache that was given away meanwhile.

The scheduler looks for a request's prefix before it knows whether there is room for the request, and writes down from which
slot its state will be copied. It took back the request's own slot where there was no room, and not that note. If the prefix
was dropped from the cache until the request's turn came, its prefill began at the first token, and from the state that the
noted slot held by then. Output is wrong. A prefill of Mamba-2 without a prefix reads no state, and is right.
"""

from ..entry import Entry, Request, SGLangSettings, small_case, small_patch

_SHARED = (*range(64), 70)  # states are tracked every 64 tokens

ENTRY = Entry(
    id="29354",
    title="Forget which state a request was to begin from, if it has to wait",
    rule="target.state",
    buggy="0.5.13 - 0.5.14",
    fixed="0.5.15",
    last_bad="0.5.14",
    trigger="layers of the gated delta rule (Qwen3-Next), the prefix cache, a request that waits while its prefix is dropped",
    revert=small_patch(
        "revert-29354",
        "sglang.srt.managers.scheduler.Scheduler._get_new_batch_prefill_raw",
        "req.kv.mamba_cow_src_index = None",
        "pass",
    ),
    case=small_case(
        Request(id="a", prompt=_SHARED, max_new_tokens=1),
        Request(id="b", prompt=(20, 21, 22, 23), max_new_tokens=4, arrive=2),  # takes what is left, and then a's
        Request(id="c", prompt=_SHARED, max_new_tokens=1, arrive=3),
        model="qwen3-next-nextn",
        chunked_prefill_size=512,
        sglang=SGLangSettings(radix_cache=True, max_total_tokens=72),
    ),
)
