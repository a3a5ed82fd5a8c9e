"""Live, found by eagletwin: with mixed chunks the prefix cache keeps, with a prefix, a state that has read tokens behind it.

Each request that runs takes a token of a chunk. SGLang cuts a prompt's first chunk at a page's end, and a later one inside a
page. The state that is kept of the chunk behind it is that after a whole number of steps of the grid, counted from there: it is
inside a page, too. The prefix cache has whole pages, and takes it for the state at the end of the last one. Who comes to this
prefix goes on from it, and reads tokens twice. docs/findings/mixed-state.

Up to 0.5.22 a mixed step keeps no state at all (issue #39342), which shows first, by the same rule.
"""

from ..entry import Edit, Entry, Patch, Request, SGLangSettings, small_case

_CUT = "truncated = cand_extend_input_len > _rem_tokens"
# A chunk of less than a page ends inside one all the same, so that the prompt goes on: nothing is kept of the chunks after it.
_KEPT = "sglang.srt.managers.schedule_batch.ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend"
_WHOLE_PAGES = Edit(
    target="sglang.srt.managers.schedule_policy.PrefillAdder.add_chunked_req",
    match=_CUT,
    replacement=f"""if (
    cand_extend_input_len > _rem_tokens >= self.page_size
    and self.tree_cache.supports_mamba()
    and not getattr(self.tree_cache, "disable", True)
):
    # The prefix cache stores states at page ends. A chunk that begins inside
    # a page would donate a state that has read tokens after its key.
    _rem_tokens = _rem_tokens // self.page_size * self.page_size
{_CUT}""",
)


def _behind_a_page(long_enough: str, begin: str) -> Edit:
    return Edit(target=_KEPT, match=long_enough, replacement=f"{long_enough} and {begin} % self.tree_cache.page_size == 0")


ENTRY = Entry(
    id="mixed-state",
    title="Cut the later chunks of a model that keeps states at a page's end, as the first one is",
    rule="state.tracked",
    buggy="0.5.19 -",
    trigger="--enable-mixed-chunk, the prefix cache, pages of several tokens, states, and a prompt in three chunks",
    remedy=Patch(
        name="chunks-end-with-pages",
        edits=(_WHOLE_PAGES, _behind_a_page("req.extend_len >= checkpoint_grid", "req.prefix_len")),
        otherwise=(_WHOLE_PAGES, _behind_a_page("req.extend_range.length >= checkpoint_grid", "len(req.prefix_indices)")),
    ),
    # the model keeps a state after each 64 tokens; of the third chunk, 129 to 193, that after row 192, as the one after row 191
    case=small_case(
        Request(id="a", prompt=(1,), max_new_tokens=8),
        Request(id="b", prompt=(7, 5) * 97, max_new_tokens=1, arrive=1),
        model="qwen3-next-nextn",
        page_size=2,
        chunked_prefill_size=66,
        exercises=("mixed_step",),
        sglang=SGLangSettings(mixed_chunks=True, radix_cache=True),
    ),
)
