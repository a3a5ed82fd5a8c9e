"""Found by eagletwin: six live bugs of SGLang's pipelines (`--pp-size`), whose stages run EAGLE since 0.5.21.

* `pipeline-tail`: the last stage drafts the next round's tree when a round is over, before anybody has seen whether the request
  ends with it. One that is a round from the end of its context is drafted for behind it. A step of draft decode has room for as
  many KV indices as the batch has requests times the context's length: where all of them are at their end, its indices run into
  the next step's, and those of the last step past the tensor.
* `pipeline-pause`: the pipeline's loop does not look at a pause (`/pause_generation`), and goes on. What is to be done while
  nothing runs, such as an update of the weights, is done between two rounds.
* `pipeline-hidden`: the stages before the last one are not told the hidden states that a request asks for. The first stage,
  which answers, reads them all the same: one request ends the server. With log-probabilities beside it gets none.
* `pipeline-mixed`: with mixed chunks a step that gives running requests a token beside a chunk which is not the last one of its
  prompt does not say which tokens are verified next. All stages end at the next round.
* `pipeline-empty`: a prompt in chunks goes on in another micro-batch's turn. With mixed chunks that one's decoding requests are
  taken off the budget. Where nothing is left, the chunk has no tokens. It is launched alone where nothing is mixed, as for
  log-probabilities, and the first stage ends.
* `pipeline-zeros`: nobody has drafted for a request's first round, whose tree has the token 0 in all nodes. Where it samples,
  each child of the root has its own part of the coin: token 0 is accepted with its probability times the number of children, up
  to 1. All others are too rare.

Without a pipeline none of them happens: a request that has ended is not drafted for, and the other loops look at the pause.
docs/findings has a report of each.
"""

from functools import partial

from ..entry import Edit, Entry, Event, Logprobs, Needs, Patch, Request, Sampling, SGLangSettings, small_case, small_patch

_entry, _case = partial(Entry, buggy="0.5.21 -", needs=Needs(pp=2)), partial(small_case, model="llama-gqa")
_MIXIN = "sglang.srt.managers.scheduler_pp_mixin.SchedulerPPMixin"
_ADD_CHUNK = "sglang.srt.managers.schedule_policy.PrefillAdder.add_chunked_req"

# Its last round begins with 12 tokens and ends with 17, one more than its context holds.
TAIL = _entry(
    id="pipeline-tail",
    title="Make draft decode's rows of KV indices wide enough for a draft behind the end of a context",
    rule="kernel.memory",
    trigger="--pp-size, and a request that a round with accepted drafts brings to the end of its context",
    case=_case(
        Request(id="a", prompt=(24, 27, 38, 48, 49, 0, 44), max_new_tokens=7),
        num_steps=4,
        exercises=("draft_decode", "accept_all"),
        sglang=SGLangSettings(context_length=16),
    ),
    remedy=small_patch(
        "room-behind-the-context",
        "sglang.srt.layers.attention.triton_backend.TritonMultiStepDraftBackend.__init__",
        "self.attn_backends[0].max_context_len",
        "self.attn_backends[0].max_context_len + 2 * speculative_num_steps + 1",
    ),
)

PAUSE = _entry(
    id="pipeline-pause",
    title="Have a pipeline look at a pause",
    rule="schedule.events",
    trigger="--pp-size, and a pause (/pause_generation)",
    case=_case(Request(id="a", prompt=(7,), max_new_tokens=1), events=(Event(at=0, kind="pause"),)),
    remedy=small_patch(
        "a-pipeline-pauses",
        f"{_MIXIN}.event_loop_pp",
        """plan = self.get_next_batch_to_run(
                    running_batch=self.running_batch, last_batch=self.last_batch
                )
                self.running_batch = plan.running_batch
                self.mbs[mb_id] = plan.batch_to_run""",
        """# Batches in flight complete during a pause; no new one starts.
self.mbs[mb_id] = None
if not self._engine_paused:
    plan = self.get_next_batch_to_run(
        running_batch=self.running_batch, last_batch=self.last_batch
    )
    self.running_batch = plan.running_batch
    self.mbs[mb_id] = plan.batch_to_run""",
    ),
)

HIDDEN = _entry(
    id="pipeline-hidden",
    title="Tell all stages the hidden states that a request asks for",
    rule="engine.crash",
    trigger="--pp-size, --enable-return-hidden-states, and a request that asks for hidden states",
    case=_case(Request(id="a", prompt=(7,), max_new_tokens=1, hidden_states="all")),
    remedy=Patch(
        name="states-go-round",
        edits=(
            Edit(
                target=f"{_MIXIN}._pp_prepare_tensor_dict",
                match="draft_input = result.next_draft_input",
                replacement="""if batch.return_hidden_states:
    # The first stage answers requests, but the last one has their states.
    tensor_dict["returned_hidden_states"] = result.logits_output.hidden_states
    tensor_dict["extend_input_len_per_req"] = result.extend_input_len_per_req
draft_input = result.next_draft_input""",
            ),
            Edit(
                target=f"{_MIXIN}._pp_prep_batch_result",
                match="if self.pp_group.is_first_rank:\n        observer",
                replacement="""if batch.return_hidden_states:
    if logits_output is None:
        logits_output = LogitsProcessorOutput(next_token_logits=None)
    logits_output.hidden_states = pp_outputs["returned_hidden_states"]
    extend_input_len_per_req = pp_outputs["extend_input_len_per_req"]
if self.pp_group.is_first_rank:
    observer""",
            ),
        ),
    ),
)

# b decodes beside a's chunks, for which a budget of two tokens leaves one.
MIXED = _entry(
    id="pipeline-mixed",
    title="Relay the tokens of a mixed step whose chunk is not the last one",
    rule="engine.crash",
    trigger="--pp-size, --enable-mixed-chunk, and a request that decodes beside a chunk in the middle of another's prompt",
    case=_case(
        Request(id="a", prompt=(7, 8, 9, 10, 11), max_new_tokens=1, arrive=1),
        Request(id="b", prompt=(7,), max_new_tokens=3),
        chunks=(2, 2, 2),
        sglang=SGLangSettings(mixed_chunks=True),
    ),
    remedy=small_patch(
        "tokens-of-a-mixed-step-go-on",
        "sglang.srt.managers.scheduler.Scheduler._get_new_batch_prefill_raw",
        "new_batch.decoding_reqs = running_batch.reqs",
        """new_batch.decoding_reqs = running_batch.reqs
# Each of them gets a token, whatever its chunks are.
new_batch.contains_last_prefill_chunk = True""",
    ),
)

# b decodes in the turn of a's second chunk, and takes the whole budget of one token.
EMPTY = _entry(
    id="pipeline-empty",
    title="Give a prompt's chunk a token where decoding requests leave it none",
    rule="engine.crash",
    trigger="--pp-size, --enable-mixed-chunk, log-probabilities, and a micro-batch of as many decoding requests as a chunk may "
    "have tokens",
    case=_case(
        Request(id="a", prompt=(7, 8), max_new_tokens=1, arrive=1),
        Request(id="b", prompt=(7,), max_new_tokens=3, logprobs=Logprobs()),
        chunks=(1, 1, 1),
        sglang=SGLangSettings(mixed_chunks=True),
    ),
    remedy=Patch(
        name="no-empty-chunk",
        edits=(
            Edit(
                target=_ADD_CHUNK,
                match="if self.kv_shard_granule:",
                replacement="""# In a pipeline this micro-batch's running requests may take the whole
# budget. A chunk is never empty: it may exceed the budget by a token.
_rem_tokens = max(_rem_tokens, 1)
if self.kv_shard_granule:""",
            ),
            Edit(
                target=_ADD_CHUNK,
                match="floored if floored > 0 else self.rem_chunk_tokens",
                replacement="floored if floored > 0 else max(self.rem_chunk_tokens, 1)",
            ),
        ),
    ),
)

# The coin is 0.238: token 0, of probability 0.214, is refused as the first child, and accepted as the second.
ZEROS = _entry(
    id="pipeline-zeros",
    title="Have children of different tokens in a tree that nobody drafted",
    rule="verify.accept",
    trigger="--pp-size, topk > 1, and a request that samples",
    case=_case(
        Request(id="a", prompt=(41,), max_new_tokens=2, sampling=Sampling(temperature=1.0, seed=696)),
        topk=2,
        num_draft_tokens=3,
        sglang=SGLangSettings(deterministic=True),
    ),
    remedy=small_patch(
        "different-children",
        "sglang.srt.speculative.pp_spec_relay.PPSpecRelayInput.degenerate",
        "tokens[:, 0] = bonus_tokens.to(torch.int64)",
        """tokens += torch.arange(-1, num_draft_tokens - 1, device=tokens.device)
tokens[:, 0] = bonus_tokens.to(torch.int64)""",
    ),
)

ENTRIES = (TAIL, PAUSE, HIDDEN, MIXED, EMPTY, ZEROS)
