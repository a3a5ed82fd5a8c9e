"""Live: verify leaves out custom logit processors, by which a thinking budget or a ban of tokens is kept.

The first token has them, as its prefill goes through SGLang's sampler. Reported in issues 21724 and 26330, with PR 27769 open.
SGLang's other algorithms apply them in their verify.
"""

from ..entry import Edit, Entry, Patch, Processor, Request, small_case

_APPLY = """if sampling_info.has_custom_logit_processor:
    from sglang.srt.layers.sampler import apply_custom_logit_processor
    apply_custom_logit_processor(next_token_logits, sampling_info, {of}.draft_token_num)
"""


def _apply(target: str, of: str) -> Edit:
    candidates = f"candidates = {of}.draft_token.reshape(bs, {of}.draft_token_num)"
    return Edit(target=target, match=candidates, replacement=_APPLY.format(of=of) + candidates)


ENTRY = Entry(
    id="logit-processor",
    title="Apply custom logit processors in EAGLE's verify",
    rule="verify.accept",
    buggy="0.5.9 -",
    trigger="--enable-custom-logit-processor, and a request that has one",
    remedy=Patch(
        name="processors-in-verify",
        edits=(_apply("sglang.srt.speculative.eagle_utils.eagle_sample", "verify_input"),),
        # up to 0.5.13, of the v2 worker; the older one has them
        otherwise=(_apply("sglang.srt.speculative.eagle_info_v2.EagleVerifyInputV2Mixin.sample", "self"),),
    ),
    case=small_case(Request(id="a", prompt=(7,), max_new_tokens=2, processor=Processor(kind="forbid", seed=2))),
)
