"""Live: what a prefill's result makes of a request that was retracted before anybody looked at it. It needs no draft.

With overlap the next decode is made before the result of a prefill is looked at, and may retract for want of slots a request
of that prefill. Its token is thrown away, and rightly so.

* `retracted-logprobs`: the logprobs of all prompts of a batch lie behind each other, and the place in them does not move on
  behind a retracted request. The next one is told those of the retracted one's rows.
* `retracted-stream`: a streamed request that was retracted is sent a message without a token. A decode's result does the same.
"""

from ..entry import Case, Edit, Entry, Logprobs, Needs, Patch, Request, SGLangSettings, small_case

# Both prompts fit the pool, and the rows that two rounds of both take do not. Of two requests with as many tokens the one with
# the longer prompt is retracted, and up to 0.5.16 the other one: either shows it.
_FIRST, _SECOND = tuple(range(1, 29)), tuple(range(40, 67))
_TRIGGER = "overlap, and a request that is retracted for want of slots before the result of its {} is looked at"
_NEXT = "for i, (req, next_token_id) in enumerate(zip(batch.reqs, next_token_ids)):"
_ADVANCES = {
    "match": _NEXT,
    "replacement": f"{_NEXT}\n"
    "    if batch.return_logprob and req.is_retracted:\n"
    "        logprob_pt += extend_input_len_per_req[i] - extend_logprob_start_len_per_req[i]",
}
_PREFILL = "process_batch_result_prefill"
_MIXIN = "sglang.srt.managers.scheduler_output_processor_mixin.SchedulerOutputProcessorMixin"
_PROCESSOR = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
_SENDS = "should_output &= not req.check_match_stop_str_prefix()"
_SENDS_TOKENS = {
    "match": _SENDS,
    "replacement": "should_output &= len(req.output_ids) > req.send_token_offset and not req.check_match_stop_str_prefix()",
}


def _case(*, logprobs: Logprobs | None = None, stream: bool = False) -> Case:
    requests = (
        Request(id="a", prompt=_FIRST, max_new_tokens=2, logprobs=logprobs, stream=stream),
        Request(id="b", prompt=_SECOND, max_new_tokens=2, logprobs=logprobs, stream=stream),
    )
    return small_case(*requests, num_steps=2, exercises=("retraction",), sglang=SGLangSettings(max_total_tokens=64))


LOGPROBS = Entry(
    id="retracted-logprobs",
    title="Give no request the logprobs of a retracted request's prompt",
    rule="output.logprobs",
    buggy="0.5.9 -",
    trigger=f"{_TRIGGER.format('prefill')}; logprob_start_len of it and of another one behind it",
    remedy=Patch(
        name="logprobs-behind-a-retracted-request",
        edits=(Edit(target=f"{_PROCESSOR}.{_PREFILL}", **_ADVANCES),),
        otherwise=(Edit(target=f"{_MIXIN}.{_PREFILL}", **_ADVANCES),),  # up to 0.5.12.post1
    ),
    needs=Needs(overlap=True),
    case=_case(logprobs=Logprobs(start=0)),
)

STREAM = Entry(
    id="retracted-stream",
    title="Send no message without a token to a request that was retracted",
    rule="output.stream",
    buggy="0.5.9 -",
    trigger=f"{_TRIGGER.format('batch')}, and is streamed",
    remedy=Patch(
        name="no-message-without-a-token",
        edits=(
            Edit(
                target="sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator.accept",
                **_SENDS_TOKENS,
            ),
        ),
        # up to 0.5.12.post1
        otherwise=(Edit(target=f"{_MIXIN}.stream_output_generation", **_SENDS_TOKENS),),
    ),
    needs=Needs(overlap=True),
    case=_case(stream=True),
)

ENTRIES = (LOGPROBS, STREAM)
