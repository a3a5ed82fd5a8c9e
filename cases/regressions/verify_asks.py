"""Live: verify leaves out what requests ask for. The first token has it, as its prefill goes through SGLang's sampler.

* `logit-processor`: custom logit processors, by which a thinking budget or a ban of tokens is kept. Reported in issues 21724
  and 26330, with PR 27769 open. SGLang's other algorithms apply them in their verify.
* `min-p`: min_p. Reported in issue 10617, which says the same of logit_bias; that is applied in 0.5.23.
"""

from eagletwin.harness.core.case import Case, Processor, Request, Sampling
from eagletwin.harness.core.patch import Edit, Patch

from ..entry import Entry

_SAMPLE = "sglang.srt.speculative.eagle_utils.eagle_sample"
_APPLY = """if sampling_info.has_custom_logit_processor:
    from sglang.srt.layers.sampler import apply_custom_logit_processor
    apply_custom_logit_processor(next_token_logits, sampling_info, {of}.draft_token_num)
"""
_CUT = """if sampling_info.need_min_p_sampling:
    min_ps = torch.repeat_interleave(sampling_info.min_ps, verify_input.draft_token_num, dim=0).view(-1, 1)
    target_probs = torch.where(target_probs < target_probs.amax(-1, keepdim=True) * min_ps, 0.0, target_probs)
    target_probs = target_probs / target_probs.sum(-1, keepdim=True)
"""


def _apply(target: str, of: str) -> Edit:
    candidates = f"candidates = {of}.draft_token.reshape(bs, {of}.draft_token_num)"
    return Edit(target=target, match=candidates, replacement=_APPLY.format(of=of) + candidates)


def _case(name: str, **asks: object) -> Case:
    request = Request(id="a", prompt=(7,), max_new_tokens=2, **asks)  # type: ignore[arg-type]
    return Case(name=name, model="llama-tiny", num_steps=1, requests=(request,))


PROCESSOR = Entry(
    id="logit-processor",
    title="Apply custom logit processors in EAGLE's verify",
    rule="verify.accept",
    buggy="0.5.9 -",
    fixed="",
    trigger="--enable-custom-logit-processor, and a request that has one",
    remedy=Patch(
        name="processors-in-verify",
        edits=(_apply(_SAMPLE, "verify_input"),),
        # up to 0.5.13, of the v2 worker; the older one has them
        otherwise=(_apply("sglang.srt.speculative.eagle_info_v2.EagleVerifyInputV2Mixin.sample", "self"),),
    ),
    case=_case("logit-processor", processor=Processor(kind="forbid", seed=2)),
)

MIN_P = Entry(
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
                target=_SAMPLE,
                match="target_probs = target_probs.reshape(bs, verify_input.draft_token_num, -1)",
                replacement=_CUT + "target_probs = target_probs.reshape(bs, verify_input.draft_token_num, -1)",
            ),
        ),
    ),
    case=_case("min-p", sampling=Sampling(temperature=3, min_p=1)),
)
