"""PR #27095 (closed; 0.5.14 has what it asked for): verify cleared the states that a prefill had just made.

Since PR #24954 a slot that a request is given is cleared in the forward of its prefill, and no longer when it is given. The
batch kept the list of those slots. If it went on to decode as it was, with no request beside those of the prefill, the first
verify cleared them once more, and began from no state. Output is wrong from there on, of a request alone, too; a batch that
joins another or loses a request drops the list. A slot that was to be copied from the prefix cache is copied once more in the
same way.
"""

from ..entry import Edit, Entry, Patch, Request, small_case

ENTRY = Entry(
    id="27095",
    title="Clear a request's state in its prefill alone, and not in the verify after it",
    rule="target.kv",
    buggy="0.5.13 - 0.5.13.post1",
    fixed="0.5.14",
    last_bad="0.5.13.post1",
    trigger="layers that keep a state (Qwen3-Next, Nemotron-H), a batch that decodes as it was prefilled, no CUDA graphs",
    revert=Patch(
        name="revert-27095",
        edits=(
            Edit(
                target="sglang.srt.model_executor.model_runner.ModelRunner._maybe_execute_deferred_mamba_cow_and_clear",
                match="or forward_batch.forward_mode.is_target_verify()",
                replacement="",
            ),
            # what later releases clear as well: the batch's list
            Edit(
                target="sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_decode",
                match="self.mamba_clear_indices = None",
                replacement="pass",
            ),
        ),
    ),
    case=small_case(Request(id="a", prompt=(49,), max_new_tokens=2), model="qwen3-next-nextn"),
)
