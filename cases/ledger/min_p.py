"""Live: verify leaves out min_p. The first token has it, as its prefill goes through SGLang's sampler.

Reported in issue 10617, which says the same of logit_bias; that is applied in 0.5.23.
"""

from ..entry import Entry, Request, Sampling, small_case, small_patch

_CUT = """if sampling_info.need_min_p_sampling:
    min_ps = torch.repeat_interleave(sampling_info.min_ps, verify_input.draft_token_num, dim=0).view(-1, 1)
    target_probs = torch.where(target_probs < target_probs.amax(-1, keepdim=True) * min_ps, 0.0, target_probs)
    target_probs = target_probs / target_probs.sum(-1, keepdim=True)
"""

ENTRY = Entry(
    id="min-p",
    title="Apply min_p in EAGLE's verify",
    rule="verify.probabilities",
    buggy="0.5.9 -",
    trigger="min_p above 0, and a temperature",
    remedy=small_patch(
        "min-p-in-verify",
        "sglang.srt.speculative.eagle_utils.eagle_sample",
        "target_probs = target_probs.reshape(bs, verify_input.draft_token_num, -1)",
        _CUT + "target_probs = target_probs.reshape(bs, verify_input.draft_token_num, -1)",
    ),
    case=small_case(Request(id="a", prompt=(7,), max_new_tokens=2, sampling=Sampling(temperature=3, min_p=1))),
)
