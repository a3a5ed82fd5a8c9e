"""Live: three bugs of requests that are retracted.

Two need no draft: a prefill's result is wrong for a request that was retracted before anybody looked at it. With overlap the
next decode is made before the result of a prefill is looked at, and may retract for want of slots a request of that prefill.
Its token is thrown away, and rightly so.

* `retracted-logprobs`: the logprobs of all prompts of a batch lie behind each other, and the place in them does not move on
  behind a retracted request. The next one is told those of the retracted one's rows.
* `retracted-stream`: a streamed request that was retracted is sent a message without a token. A decode's result does the same.

`retracted-chunk-tail`: a retracted request is prefilled again in chunks, of which one ends in what it has emitted.

At the end of a chunk that is not the last, the draft must consume the next token that is known (PR #26329). SGLang looks it up
in the request's prompt alone, and behind that takes what the target gives there. A request that samples draws another token.
A greedy one with penalties gets another, too: they count what it was sent, and that is more by now. So does a greedy one with
a grammar, which says what may follow all that it was sent. The draft's row there is then that of a token which the request does
not have. A greedy request with neither gets the token that it got before, and shows nothing; but in bfloat16 rounding may
decide otherwise between two tokens that are nearly alike. It costs acceptance and never output. Read in 0.5.13 and later; shown
from 0.5.14 on, where verify samples here.
"""

from msgspec.structs import replace

from ..entry import (
    Case,
    Edit,
    Entry,
    Event,
    Grammar,
    Logprobs,
    Loses,
    Needs,
    Patch,
    Penalties,
    Request,
    Sampling,
    SGLangSettings,
    small_case,
    small_patch,
)

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

_TAIL_CASE = small_case(
    Request(id="a", prompt=(7,), max_new_tokens=5, sampling=Sampling(temperature=5)),
    name="retracted-chunk-tail",
    chunks=(64, 2),
    events=(Event(at=2, kind="retract"),),
    exercises=("chunked_prefill", "retraction_in_decode", "sampled_verify"),
    sglang=SGLangSettings(random_seed=1),
)
_PENALIZED = Request(id="a", prompt=(5,), max_new_tokens=5, penalties=Penalties(frequency=1))
# Its first token is an `a`. After it came back its grammar wants a `c`, at the prompt's end as well.
_CONSTRAINED = Request(id="a", prompt=(7,), max_new_tokens=2, grammar=Grammar(rules=("ac",)))

CHUNK_TAIL = Entry(
    id="retracted-chunk-tail",
    title="At a chunk's tail in what a retracted request has emitted, consume the token that it emitted",
    rule="draft.input_ids",
    buggy="0.5.13 -",
    trigger="a request that samples, or has penalties or a grammar, is retracted, "
    "and a chunk of its second prefill ends behind its prompt",
    loses=Loses("batches", layers=False, needs="sampling"),
    remedy=small_patch(
        "retracted-chunk-tail",
        "sglang.srt.managers.schedule_batch._compute_chunked_req_next_prompt_token",
        "origin_ids = chunked_req.origin_input_ids",
        "origin_ids = [*chunked_req.origin_input_ids, *chunked_req.output_ids]",
    ),
    case=_TAIL_CASE,
    also=(
        replace(_TAIL_CASE, requests=(_PENALIZED,), exercises=()),
        replace(_TAIL_CASE, requests=(_CONSTRAINED,), chunks=(64, 1), events=(Event(at=1, kind="retract"),), exercises=()),
    ),
    rounded=True,
)

ENTRIES = (LOGPROBS, STREAM, CHUNK_TAIL)
