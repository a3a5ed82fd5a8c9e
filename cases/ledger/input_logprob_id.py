"""Live: the logprob of the vocabulary's last token, where it stands in a prompt, is returned as token 0's.

Ids above the vocabulary, which stand for images, are replaced by 0; so is the last one. With or without speculative decoding.
"""

from ..entry import Edit, Entry, Logprobs, Patch, Request, small_case

_EDIT = {
    "match": "x if x < self.model_config.vocab_size - 1 else 0",
    "replacement": "x if x < self.model_config.vocab_size else 0",
}

ENTRY = Entry(
    id="input-logprob-id",
    title="Return the vocabulary's last token in logprobs of a prompt",
    rule="output.logprobs",
    buggy="0.5.9 -",
    trigger="return_logprob with logprob_start_len, and a prompt that holds the vocabulary's last token",
    remedy=Patch(
        name="last-token-in-logprobs",
        edits=(
            Edit(
                target="sglang.srt.managers.scheduler_components.logprob_result_processor."
                "SchedulerLogprobResultProcessor._process_input_token_logprobs",
                **_EDIT,
            ),
        ),
        # up to 0.5.12.post1
        otherwise=(
            Edit(
                target="sglang.srt.managers.scheduler_output_processor_mixin."
                "SchedulerOutputProcessorMixin._process_input_token_logprobs",
                **_EDIT,
            ),
        ),
    ),
    case=small_case(Request(id="a", prompt=(7, 95), max_new_tokens=1, logprobs=Logprobs(start=0))),
)
