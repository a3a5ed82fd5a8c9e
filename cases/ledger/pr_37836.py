"""PR #37836 (first #33450; issue #31833): the prefix cache kept Mamba-2's state of another position.

A prefill leaves the states at the ends of its chunks, of which the prefix cache is given the last one of each request. The
kernels of Mamba-2 cut the whole batch into chunks, across requests, while SGLang counted the chunks of each request. From the
second request of a batch on it kept the state of another row, or one of another request. A request that goes on from there has
wrong output. Layers of the gated delta rule cut each request by itself.
"""

from ..entry import Entry, Request, SGLangSettings, small_case, small_patch

ENTRY = Entry(
    id="37836",
    title="Keep Mamba-2's state of the right position where a prefill has several requests",
    rule="state.tracked",
    buggy="0.5.13 - 0.5.19",
    fixed="0.5.20",
    last_bad="0.5.19",
    trigger="layers of Mamba-2 (Nemotron-H), the prefix cache, several prompts in a prefill",
    revert=small_patch(
        "revert-37836",
        "sglang.srt.layers.attention.hybrid_linear_attn_backend.MambaAttnBackendBase._init_track_ssm_indices_from_cpu",
        "is_mamba2 = isinstance(self, Mamba2AttnBackend)",
        "is_mamba2 = False",
    ),
    case=small_case(
        # a chunk has 16 rows: the batch has three, where its requests would have one, two and one
        Request(id="a", prompt=(0,), max_new_tokens=1),
        Request(id="b", prompt=tuple(range(20, 37)), max_new_tokens=1),
        Request(id="c", prompt=tuple(range(21, 36)), max_new_tokens=1),
        model="nemotron-h-nextn",
        chunked_prefill_size=512,
        sglang=SGLangSettings(radix_cache=True),
    ),
)
