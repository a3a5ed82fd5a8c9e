"""PR #33758: what follows a stop token was emitted, if one round brought both the stop token and max_new_tokens.

The scheduler asked for the length first and for the stop token after it. A round that brings one token cannot have both; one
that accepts drafts can, and then the *output* goes on past the stop token, up to max_new_tokens. Reported as issue #31599 and
fixed, before that was merged, in pull requests #30291 and #31569 (closed). `fuzz` finds it on any release that has it.
"""

from ..entry import Entry, OnCuda, Request, small_case, small_patch

# PR #33758 on the releases before it: the stop token is looked for before the length.
STOP_FIRST = small_patch(
    "stop-before-length",
    "sglang.srt.managers.schedule_batch.Req.update_finish_state",
    "if len(self.output_ids) >= self.sampling_params.max_new_tokens:",
    """most = self.sampling_params.max_new_tokens
if self._check_token_based_finish(self.output_ids[-new_accepted_len:]) and self.finished_len <= most:
    return
if len(self.output_ids) >= most:""",
)

ENTRY = Entry(
    id="33758",
    title="End a request at its stop token, also where the same round reaches max_new_tokens",
    rule="output.tokens",
    buggy="0.5.9 - 0.5.17",
    fixed="0.5.18",
    last_bad="0.5.17",
    trigger="a round that accepts a stop token and reaches max_new_tokens behind it",
    revert=small_patch(
        "revert-33758",
        "sglang.srt.managers.schedule_batch.Req.update_finish_state",
        "new_accepted_tokens = self.output_ids[-new_accepted_len:]\n",
        """if len(self.output_ids) >= self.sampling_params.max_new_tokens:
    self.finished_len = self.sampling_params.max_new_tokens
    self.finished_reason = FINISH_LENGTH(length=self.finished_len)
    return
new_accepted_tokens = self.output_ids[-new_accepted_len:]
""",
    ),
    on_cuda=OnCuda(green=(STOP_FIRST,), red=(), until="0.5.17"),
    case=small_case(Request(id="a", prompt=(3,), max_new_tokens=3, stop=(43,)), exercises=("accept_all",)),
)
