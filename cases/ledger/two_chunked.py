"""Live: a prompt is left half read where two requests of one batch are cut, with mixed chunks and without the radix cache.

The scheduler follows one request that is cut, as the rest of its prompt comes in the next batch. A cut at a page's end can
leave a part of the budget, since each request that runs takes a token of it. A request with `ignore_eos` takes this rest, is
cut as well, and stands in the first one's place: the first counts as read, and goes on from half a prompt. It needs no draft.
"""

from ..entry import Entry, Request, SGLangSettings, small_case, small_patch

_ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"

ENTRY = Entry(
    id="two-chunked",
    title="Cut one request a batch where one with ignore_eos follows",
    rule="draft.input_ids",
    buggy="0.5.19 -",
    trigger="mixed chunks, pages of several tokens, no radix cache, and a request with ignore_eos behind one without",
    remedy=small_patch(
        "one-chunked-request",
        f"{_ADDER}.add_one_req_ignore_eos",
        "if self.rem_chunk_tokens <= 0:",
        "if self.rem_chunk_tokens <= 0 or self.new_chunked_req is not None:",
    ),
    recorded="a request is recorded once its prompt was read to the end, which this one's never is",
    case=small_case(
        Request(id="a", prompt=(7,), max_new_tokens=2),
        Request(id="b", prompt=(7, 5, 3), max_new_tokens=1, arrive=1, stop=(1,)),
        Request(id="c", prompt=(7, 5), max_new_tokens=1, arrive=1),
        page_size=2,
        chunked_prefill_size=4,
        exercises=("mixed_step",),
        sglang=SGLangSettings(mixed_chunks=True, radix_cache=False),
    ),
)
