"""PR #26329 (landed as #26800): the tail row of a non-final prefill chunk consumed the wrong token.

At a chunk that ends at K the draft's row K-1 was given the target's argmax instead of the next prompt token, and kept that
KV row for the rest of the request.
"""

from ..entry import Entry, Loses, Patch, Request, small_case

ENTRY = Entry(
    id="26329",
    title="Fix the EAGLE chunked-prefill next-token chain",
    rule="draft.input_ids",
    buggy="0.5.9 - 0.5.12.post1",
    fixed="0.5.13",
    last_bad="0.5.12.post1",
    trigger="a prompt in two chunks or more, and a target argmax at a chunk's end that is not the next prompt token",
    loses=Loses("prompts longer than a chunk", layers=False),
    revert=Patch(name="revert-26329", sglang_toggle=26329),
    case=small_case(
        Request(id="a", prompt=(7, 19, 3), max_new_tokens=2),
        chunked_prefill_size=2,
        exercises=("chunked_prefill", "chunk_tail_differs"),
    ),
    claim=small_case(
        Request(id="a", prompt=(7, 19, 3, 5, 11, 2, 9, 4, 8, 1, 6, 12), max_new_tokens=40),
        name="claim",
        num_steps=3,
        chunked_prefill_size=2,
    ),
)
