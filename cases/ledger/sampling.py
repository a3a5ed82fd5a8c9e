"""Live: what verify leaves out of the way to a token, and one logprob.

`logit-processor`: verify leaves out custom logit processors, by which a thinking budget or a ban of tokens is kept.

The first token has them, as its prefill goes through SGLang's sampler. Reported in issues 21724 and 26330, with PR 27769 open.
SGLang's other algorithms apply them in their verify.

`min-p`: verify leaves out min_p. The first token has it, as its prefill goes through SGLang's sampler.

Reported in issue 10617, which says the same of logit_bias; that is applied in 0.5.23.

`penalties`: penalties on tokens that a request was sent before count few of these tokens. Reported in PR 33643, which is open.

* `penalties`: of each round the last token alone is counted, so accepted drafts never are. SGLang calls penalties in verify
  relaxed; what it has in mind is that a round's own tokens come too late for it, and the next round's penalties are wrong, too.
  Up to 0.5.10.post1 verify leaves penalties out.
* `penalties-2`: a request that comes back from a retraction begins to count anew, with or without speculative decoding.

`input-logprob-id`: the logprob of the vocabulary's last token, where it stands in a prompt, is returned as token 0's.

Ids above the vocabulary, which stand for images, are replaced by 0; so is the last one. With or without speculative decoding.
"""

from textwrap import indent

from ..entry import Edit, Entry, Event, Logprobs, Patch, Penalties, Processor, Request, Sampling, small_case, small_patch

_APPLY = """if sampling_info.has_custom_logit_processor:
    from sglang.srt.layers.sampler import apply_custom_logit_processor
    apply_custom_logit_processor(next_token_logits, sampling_info, {of}.draft_token_num)
"""


def _apply(target: str, of: str) -> Edit:
    candidates = f"candidates = {of}.draft_token.reshape(bs, {of}.draft_token_num)"
    return Edit(target=target, match=candidates, replacement=_APPLY.format(of=of) + candidates)


PROCESSOR = Entry(
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

_CUT = """if sampling_info.need_min_p_sampling:
    min_ps = torch.repeat_interleave(sampling_info.min_ps, verify_input.draft_token_num, dim=0).view(-1, 1)
    target_probs = torch.where(target_probs < target_probs.amax(-1, keepdim=True) * min_ps, 0.0, target_probs)
    target_probs = target_probs / target_probs.sum(-1, keepdim=True)
"""

MIN_P = Entry(
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


def _recount(orchestrator: str, under_way: str) -> str:
    """Code that has the penalizers count all that each request was sent, and what is under way to it."""
    return f"""for row, req in enumerate({orchestrator}.reqs()):
    tokens = [*req.output_ids, *{under_way}.get(id(req), ())]
    sent = torch.tensor(tokens, dtype=torch.int64, device={orchestrator}.device)
    counts = torch.bincount(sent, minlength={orchestrator}.vocab_size)
    for one in {orchestrator}.penalizers.values():
        if hasattr(one, "cumulated_frequency_penalties"):
            one.cumulated_frequency_penalties[row] = counts * one.frequency_penalties[row]
        if hasattr(one, "cumulated_presence_penalties"):
            one.cumulated_presence_penalties[row] = (counts > 0) * one.presence_penalties[row]
        if hasattr(one, "cumulated_repetition_penalties"):
            one.cumulated_repetition_penalties[row] = torch.where(counts > 0, one.repetition_penalties[row], 1.0)
        if hasattr(one, "len_output_tokens"):
            one.len_output_tokens[row] = len(sent)
"""


_REQUIRED = "if self.penalizer_orchestrator.is_required:\n"
# With overlap a batch is launched before the results of the one before it are processed.
_UNDER_WAY = """self.forward_ct += 1
under_way = {}
for before, found in getattr(self, "result_queue", ()) if batch.sampling_info is not None else ():
    if found.copy_done is not None:
        found.copy_done.synchronize()
    tokens = found.next_token_ids.tolist()
    for row, req in enumerate(before.reqs):
        if found.accept_lens is not None:
            first = row * (len(tokens) // len(before.reqs))
            under_way.setdefault(id(req), []).extend(tokens[first : first + int(found.accept_lens[row])])
        elif not getattr(req, "inflight_middle_chunks", 0) and not getattr(req, "is_chunked", 0):
            under_way.setdefault(id(req), []).append(tokens[row])
if batch.sampling_info is not None:
    batch.sampling_info.under_way = under_way"""
_IN_ROUNDS = (
    Edit(target="sglang.srt.managers.scheduler.Scheduler.run_batch", match="self.forward_ct += 1", replacement=_UNDER_WAY),
    Edit(
        target="sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.update_penalties",
        match=_REQUIRED,
        replacement=_REQUIRED + indent(_recount("self.penalizer_orchestrator", 'getattr(self, "under_way", {})'), "    "),
    ),
)
_FROM_THE_START = Edit(  # of a request that comes back from a retraction; without overlap nothing else counts anew
    target="sglang.srt.sampling.penaltylib.orchestrator.BatchedPenalizerOrchestrator.__init__",
    match="self.is_required = is_required",
    replacement="self.is_required = is_required\nif is_required:\n" + indent(_recount("self", "{}"), "    "),
)
_REMEDY = Patch(name="penalties-of-all-tokens", edits=(*_IN_ROUNDS, _FROM_THE_START))


def _entry(number: str, title: str, rule: str, trigger: str, request: Request, *events: Event) -> Entry:
    return Entry(
        id=f"penalties{number}",
        title=title,
        rule=rule,
        buggy="0.5.9 -",
        trigger=trigger,
        remedy=_REMEDY,
        recorded="which token a prefill may give depends on its logits" if number else "",
        case=small_case(request, events=events),
    )


_PENALTIES = (
    _entry(
        "",
        "Count all tokens of a round for penalties",
        "verify.accept",
        "frequency_penalty, presence_penalty, repetition_penalty or min_new_tokens, and accepted drafts",
        Request(id="a", prompt=(59,), max_new_tokens=4, penalties=Penalties(presence=2)),
    ),
    _entry(
        "-2",
        "Count a retracted request's tokens for penalties",
        "output.tokens",
        "the same penalties, and a request that is retracted",
        Request(id="a", prompt=(16,), max_new_tokens=4, penalties=Penalties(presence=-2)),
        Event(at=2, kind="retract"),
    ),
)

_EDIT = {
    "match": "x if x < self.model_config.vocab_size - 1 else 0",
    "replacement": "x if x < self.model_config.vocab_size else 0",
}

INPUT_LOGPROB = Entry(
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

ENTRIES = (PROCESSOR, MIN_P, *_PENALTIES, INPUT_LOGPROB)
