"""Live: penalties on tokens that a request was sent before count few of these tokens. Reported in PR 33643, which is open.

* `penalties`: of each round the last token alone is counted, so accepted drafts never are. SGLang calls penalties in verify
  relaxed; what it has in mind is that a round's own tokens come too late for it, and the next round's penalties are wrong, too.
  Up to 0.5.10.post1 verify leaves penalties out.
* `penalties-2`: a request that comes back from a retraction begins to count anew, with or without speculative decoding.
"""

from textwrap import indent

from ..entry import Edit, Entry, Event, Patch, Penalties, Request, small_case


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


ENTRIES = (
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
