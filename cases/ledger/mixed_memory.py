"""Live, found by eagletwin: mixed chunks let running requests take the slots that the rest of a prompt needs, and SGLang ends.

A prompt in chunks was let in because the pool held all of it. With each chunk the requests that run join the batch as soon as
what they set aside for two rounds of drafts fits beside this chunk; nothing asks for the chunks that are left. Where these do
not fit any more, the prefill goes on without slots. With windows it waits for some. docs/findings/mixed-memory.
"""

from ..entry import Edit, Entry, Patch, Request, SGLangSettings, small_case


def _leave(match: str, end: str) -> Edit:
    return Edit(
        target="sglang.srt.managers.scheduler.Scheduler._get_new_batch_prefill_raw",
        match=match,
        replacement=(
            "chunked, rest = self.chunked_req, 0\n"
            "if chunked is not None and not self.is_hybrid_swa:\n"
            "    rest = -(-len(chunked.full_untruncated_fill_ids) // self.page_size) * self.page_size\n"
            f"    rest -= -(-chunked.{end} // self.page_size) * self.page_size\n"
            "if not running_batch.is_empty() and self.token_to_kv_pool_allocator.check_decode_capacity(\n"
            "    num_tokens=running_batch.new_tokens_required_next_decode() + rest, tree_cache=self.tree_cache\n"
            "):"
        ),
    )


ENTRY = Entry(
    id="mixed-memory",
    title="Leave the slots that the rest of a prompt in chunks needs to it in a mixed step",
    rule="engine.crash",
    buggy="0.5.19 -",
    trigger="--enable-mixed-chunk, no windows, and a prompt in chunks beside requests that run, in a pool they nearly fill",
    remedy=Patch(
        name="mixed-steps-leave-the-rest-of-a-prompt-its-slots",
        edits=(_leave("if not running_batch.is_empty() and running_batch.check_decode_mem():", "extend_end"),),
        otherwise=(_leave("if not running_batch.is_empty():", "extend_range.end"),),  # up to 0.5.21, which do not ask at all
    ),
    case=small_case(
        Request(id="a", prompt=(2,) * 49, max_new_tokens=1, arrive=1),
        Request(id="b", prompt=(1,) * 8, max_new_tokens=4),
        num_steps=3,
        chunked_prefill_size=44,
        exercises=("chunked_prefill",),
        sglang=SGLangSettings(mixed_chunks=True, max_total_tokens=64),
    ),
)
