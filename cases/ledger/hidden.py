"""Live: what a request is given that asks for hidden states (`return_hidden_states`).

* `hidden-rows`: of a prompt that comes in several chunks the last one's rows alone, with or without speculative decoding.
* `hidden-rows-2`: after a retraction one entry is a list of all rows that were computed again, and no row.
* `hidden-aux`: of a target with an EAGLE-3 head the layers that this head reads, side by side, and not the last layer's state,
  which SGLang's documentation promises: those are what `--enable-return-aux-hidden-states` is for.
* `hidden-standalone`: of a target with a plain draft model nothing. Up to 0.5.11, by reading, states were captured there, too.
* `hidden-no-tokens`: of a prompt that is read for a request of no new tokens nothing, where it wants all. Since 0.5.14 the list
  is cut to the tokens that are sent, as verify may commit more, and with none of them the prompt's rows go as well.
* `hidden-frozen`: of a frozen-KV draft in CUDA graphs rows that the next replay has overwritten. The draft clears
  `return_hidden_states` of the scheduler's batch for its own forward and leaves it so: none are copied to the host.
"""

from typing import Any

from eagletwin.harness.core.verdict import DECLARED_VIEW

from ..entry import Edit, Entry, Event, Needs, Patch, Request, SGLangSettings, small_case, small_patch

_RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
_PREFILL = f"{_RESULTS}._append_prefill_hidden_states"
_WORKER = "sglang.srt.speculative.eagle_worker_v2"

# The rows of a prompt are collected chunk by chunk, and anew after a retraction.
_OF_PROMPT = """if req.return_hidden_states is True and not (req.output_ids or req.is_retracted or req.finished()):
    if not req.hidden_states or req.hidden_states_attempt != req.retraction_count:
        req.hidden_states[:] = [[]]
        req.hidden_states_attempt = req.retraction_count
    req.hidden_states[0].extend(logits_output.hidden_states[start:hidden_state_offset].cpu().tolist())
    return hidden_state_offset
if not store or not req.return_hidden_states:"""
_ROWS = Patch(
    name="one-hidden-state-a-token",
    edits=(
        Edit(target=_PREFILL, match="if not store or not req.return_hidden_states:", replacement=_OF_PROMPT),
        Edit(
            target=_PREFILL,
            match="req.hidden_states.append(req_hidden_states.cpu().clone().tolist())",
            replacement="req.hidden_states.append(req_hidden_states[-1].cpu().tolist())",
        ),
    ),
)

_OF_LAST_LAYER = """if logits_output.last_hidden_states is not None and not batch.spec_algorithm.is_none():
    logits_output.hidden_states = logits_output.last_hidden_states
"""
_LAST_LAYER = Patch(
    name="last-layer-beside-aux",
    edits=(
        Edit(
            target="sglang.srt.layers.logits_processor.LogitsProcessor._get_last_hidden_states_to_store",
            match="self.keep_last_hidden_states",
            replacement="(self.keep_last_hidden_states or get_exec().features.enable_return_hidden_states)",
        ),
        Edit(
            target="sglang.srt.speculative.eagle_worker_common.run_eagle_verify",
            match="next_draft_input = EagleDraftInput(bonus_tokens=bonus_tokens)",
            replacement="""tree = finalize_tree_path and not batch.forward_mode.is_idle() and topk > 1
if tree and logits_output.last_hidden_states is not None:
    logits_output.last_hidden_states = _compact_accept_to_front(
        logits_output.last_hidden_states, accept_index, bs, num_draft_tokens=num_draft_tokens
    )
next_draft_input = EagleDraftInput(bonus_tokens=bonus_tokens)""",
        ),
        Edit(  # with overlap, before the next forward writes to a graph's buffers
            target="sglang.srt.managers.utils.GenerationBatchResult.copy_to_cpu",
            match="if return_hidden_states and self.logits_output.hidden_states is not None:",
            replacement="""if return_hidden_states and self.logits_output.last_hidden_states is not None:
    self.logits_output.last_hidden_states = _async_d2h(self.logits_output.last_hidden_states)
if return_hidden_states and self.logits_output.hidden_states is not None:""",
        ),
        Edit(
            target=f"{_RESULTS}.process_batch_result_prefill",
            match="hidden_state_offset = 0",
            replacement=f"{_OF_LAST_LAYER}hidden_state_offset = 0",
        ),
        Edit(
            target=f"{_RESULTS}.process_batch_result_decode",
            match="if req.return_hidden_states and logits_output.hidden_states is not None:",
            replacement=f"{_OF_LAST_LAYER}if req.return_hidden_states and logits_output.hidden_states is not None:",
        ),
    ),
)

_ASKED = "is_standalone()\nand not batch.return_hidden_states"
_STANDALONE = Patch(
    name="states-of-a-plain-target",
    edits=(
        Edit(target=f"{_WORKER}.EAGLEWorkerV2._forward_prefill_batch", match="is_standalone()", replacement=_ASKED),
        Edit(
            target=f"{_WORKER}.EAGLEWorkerV2._forward_prefill_batch",
            match="batch_output.logits_output.hidden_states,",
            replacement="""(
    None
    if self.speculative_algorithm.is_standalone()
    else batch_output.logits_output.hidden_states
),""",
        ),
        Edit(
            target=f"{_WORKER}.EagleDraftWorker._draft_extend_for_decode",
            match="hidden_states=batch_result.logits_output.hidden_states,",
            replacement="""hidden_states=(
    None
    if self.speculative_algorithm.is_standalone()
    else batch_result.logits_output.hidden_states
),""",
        ),
        Edit(target="sglang.srt.speculative.eagle_utils.eagle_prepare_for_verify", match="is_standalone()", replacement=_ASKED),
    ),
)


_NO_TOKENS = small_patch(
    "states-of-the-prompt-alone",
    "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator.accept",
    "hs = hs[: req.finished_len]",
    "hs = hs[: max(req.finished_len, int(req.sampling_params.max_new_tokens == 0))]",
)


def _entry(
    name: str, title: str, trigger: str, remedy: Patch, model: str, *requests: Request, since: str = "0.5.9", **what: Any
) -> Entry:
    plain = model == "llama-standalone"
    return Entry(
        id=name,
        title=title,
        rule="output.hidden",
        buggy=f"{'0.5.12' if plain else since} -",
        trigger=trigger,
        remedy=remedy,
        within="shifted" if plain else DECLARED_VIEW,
        case=small_case(*requests, model=model, **what),
    )


_DRAFT = "sglang.srt.speculative.frozen_kv_mtp_worker_v2.FrozenKVMTPDraftWorker.draft"
_CLEARED = "batch.return_hidden_states = False"
_BUILT = "assert forward_batch.capture_hidden_mode == CaptureHiddenMode.LAST"

ENTRIES = (
    _entry(
        "hidden-rows",
        "Give the hidden states of a prompt's first chunks, too",
        "return_hidden_states, and a prompt longer than chunked_prefill_size",
        _ROWS,
        "llama-tiny",
        Request(id="a", prompt=(7, 5), max_new_tokens=2, hidden_states="all"),  # the fix of hidden-aux is in a round
        chunks=(1,),
    ),
    _entry(
        "hidden-rows-2",
        "Give a retracted request one hidden state a token",
        "return_hidden_states, and a request that is retracted",
        _ROWS,
        "llama-tiny",
        Request(id="a", prompt=(7,), max_new_tokens=3, hidden_states="all"),
        events=(Event(at=1, kind="retract"),),
    ),
    _entry(
        "hidden-aux",
        "Give the last layer's hidden states beside an EAGLE-3 head",
        "EAGLE-3 and return_hidden_states",
        _LAST_LAYER,
        "llama-eagle3",
        Request(id="a", prompt=(7,), max_new_tokens=2, hidden_states="all"),
    ),
    _entry(
        "hidden-standalone",
        "Give hidden states beside a plain draft model",
        "STANDALONE and return_hidden_states",
        _STANDALONE,
        "llama-standalone",
        Request(id="a", prompt=(7,), max_new_tokens=2, hidden_states="all"),
    ),
    _entry(
        "hidden-no-tokens",
        "Give the hidden states of a prompt to a request of no new tokens",
        "return_hidden_states and max_new_tokens 0",
        _NO_TOKENS,
        "llama-tiny",
        Request(id="a", prompt=(7,), max_new_tokens=0, hidden_states="all"),
        Request(id="b", prompt=(5,), max_new_tokens=2),  # the fix of hidden-aux is in a round
        since="0.5.14",
    ),
    Entry(
        id="hidden-frozen",
        title="Restore the scheduler's return_hidden_states after a frozen-KV draft",
        rule="output.hidden",
        buggy="0.5.21 -",
        trigger="CUDA graphs, frozen-KV MTP (Gemma-4's assistant), and requests that ask for hidden states",
        needs=Needs(graphs=True),
        remedy=Patch(
            name="states-of-a-frozen-draft",
            edits=(
                Edit(
                    target=_DRAFT, match=_CLEARED, replacement=f"return_hidden_states = batch.return_hidden_states\n{_CLEARED}"
                ),
                Edit(target=_DRAFT, match=_BUILT, replacement=f"batch.return_hidden_states = return_hidden_states\n{_BUILT}"),
            ),
        ),
        case=small_case(
            Request(id="a", prompt=(7, 3, 9, 11, 5), max_new_tokens=10, hidden_states="all"),
            model="gemma-4-assistant",
            num_steps=3,
            sglang=SGLangSettings(graphs=(1, 2, 4)),
        ),
    ),
)
