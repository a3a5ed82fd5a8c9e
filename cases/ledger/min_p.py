"""Live: verify leaves out min_p. The first token has it, as its prefill goes through SGLang's sampler.

Reported in issue 10617, which says the same of logit_bias; that is applied in 0.5.23.
"""

from eagletwin.harness.core.case import Case, Request, Sampling
from eagletwin.harness.core.patch import Edit, Patch

from ..entry import Entry

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
    fixed="",
    trigger="min_p above 0, and a temperature",
    remedy=Patch(
        name="min-p-in-verify",
        edits=(
            Edit(
                target="sglang.srt.speculative.eagle_utils.eagle_sample",
                match="target_probs = target_probs.reshape(bs, verify_input.draft_token_num, -1)",
                replacement=_CUT + "target_probs = target_probs.reshape(bs, verify_input.draft_token_num, -1)",
            ),
        ),
    ),
    case=Case(
        name="min-p",
        model="llama-tiny",
        num_steps=1,
        requests=(Request(id="a", prompt=(7,), max_new_tokens=2, sampling=Sampling(temperature=3, min_p=1)),),
    ),
)
