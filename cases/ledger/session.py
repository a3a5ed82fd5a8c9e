"""Live, found by eagletwin: six faults of streaming sessions.

* `session-last-token`: when a request of a session ends, its last token counts among those whose rows the session keeps. No
  forward has consumed that token where nothing was committed behind it: the target's row there is whatever lies in the slot,
  and the next request reads it. Where verify had committed more, the target's row is right, and the draft's is one of the
  token that came behind, and not of the next request's first. The remedy keeps one row less, and gives the session's rows up
  where none is left: of a prompt of one token without an answer.
* `session-retracted`: a retraction counts as the end of a request. One that is retracted and then aborted stays in the
  session's history, which is to go on behind the last request that finished; and one that is retracted a second time is taken
  for its own predecessor and loses its session. The remedy lets a request end a session's turn only when it is finished, and
  gives the rows of one that is aborted after a retraction back.
* `session-retracted-2`: the same of one that is aborted while it waits to run again: it leaves the queue and its rows stay with
  the session, which the next request goes on behind. The remedy gives them back as it leaves the queue.
* `session-full`: open sessions keep their entries of req_to_token. When they have all of them, SGLang lets no request run:
  those neither that would run on their session's own entry. The remedy counts that entry for them.
* `session-adapter`: a request goes on behind the rows that its session keeps, whatever adapter (LoRA) they were computed with.
  The prefix cache keeps rows of adapters apart, and a session does not. The remedy gives up what another adapter has left.
* `session-hidden`: the end of a turn cuts `output_ids` to what is sent, before the state of the last token is looked up. That
  counts from the end of the list back to the step's first token, and so takes the state of the last token that verify
  committed, which may be one behind the end. The remedy ends the turn after what the request is told was collected.
"""

from msgspec.structs import replace

from ..entry import Adapter, Edit, EngineSettings, Entry, Event, Patch, Request, SGLangSettings, small_case

_SESSION = "sglang.srt.session.streaming_session.StreamingSession"
_RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
_DECODE = f"{_RESULTS}.process_batch_result_decode"
_FINISH = "self._handle_finish_state_updated_req(req, batch, result, i, logits_output)\n"
_PREFILL = "sglang.srt.managers.scheduler.Scheduler._get_new_batch_prefill_raw"
_ON_ITS_OWN = "({0}.session is not None and {0}.session.session_id in self.tree_cache.session_records())"
_SETTINGS = SGLangSettings(radix_cache=True)
_FIRST = Request(id="a", prompt=(1, 2, 3), max_new_tokens=2, session="s")
_NEXT = Request(id="b", prompt=(4,), max_new_tokens=2, session="s")
_CASE = small_case(_FIRST, _NEXT, exercises=("session_goes_on",), sglang=_SETTINGS)

LAST_TOKEN = Entry(
    id="session-last-token",
    title="Keep no row of the last token that a session's request was sent",
    rule="session.rows",
    buggy="0.5.22 -",
    trigger="--enable-streaming-session, and a request whose session answered another before",
    remedy=Patch(
        name="last-token-again",
        edits=(
            Edit(
                target=f"{_SESSION}.try_cache_finished_req",
                match="slot.kv.kv_committed_len = min(target, slot.kv.kv_allocated_len)",
                replacement="""# The last token has no row of its own: no forward consumed it, or the
# draft's row there is of an overshot token. The next turn consumes it again.
slot.kv.kv_committed_len = min(target - 1, slot.kv.kv_allocated_len)""",
            ),
            Edit(
                target=f"{_SESSION}.try_cache_finished_req",
                match="return True",
                replacement="""if not slot.kv.kv_committed_len:  # a prompt of one token without an answer
    self.release_session(req.session.session_id)
return True""",
            ),
        ),
    ),
    recorded="what a request finds in its session is not recorded",
    case=_CASE,
)

_NO_END = Edit(
    target=f"{_SESSION}.try_cache_finished_req",
    match="req.session.finish_req(req)",
    replacement="if req.finished():\n    req.session.finish_req(req)",
)

RETRACTED = Entry(
    id="session-retracted",
    title="End a turn of a session when its request finishes, and not when it is retracted",
    rule="session.rows",
    buggy="0.5.22 -",
    trigger="--enable-streaming-session, and a request of a session that is retracted, then aborted or retracted again",
    remedy=Patch(
        name="retracted-is-no-end",
        edits=(
            _NO_END,
            Edit(
                target=f"{_SESSION}.find_active_slot",
                match="req.release_mm_inputs_on_abort()",
                replacement="if req.retracted_stain:\n    self.release_session(req.session.session_id)\n"
                "req.release_mm_inputs_on_abort()",
            ),
        ),
    ),
    case=replace(
        _CASE,
        requests=(replace(_FIRST, max_new_tokens=8), _NEXT),
        events=(Event(at=2, kind="abort", request="a"), Event(at=2, kind="retract")),
        exercises=("session_after_abort",),
    ),
)

WAITING = Entry(
    id="session-retracted-2",
    title="Give up the rows of a session's request that is aborted while it waits after a retraction",
    rule="pool.accounting",
    buggy="0.5.22 -",
    trigger="--enable-streaming-session, and a request of a session that is retracted, and aborted before it runs again",
    remedy=Patch(
        name="retracted-and-aborted-as-it-waits",
        edits=(
            _NO_END,
            Edit(
                target="sglang.srt.managers.scheduler.Scheduler._release_aborted_request",
                match="req.session.abort_req()",
                replacement="if req.retracted_stain and not req.kv.holds_kv:\n"
                "    self.tree_cache.release_session(req.session.session_id)\n"
                "req.session.abort_req()",
            ),
        ),
    ),
    case=replace(
        _CASE,
        requests=(replace(_FIRST, max_new_tokens=8), replace(_NEXT, arrive=6)),
        events=(
            Event(at=1, kind="pause"),
            Event(at=1, kind="retract"),
            Event(at=2, kind="abort", request="a"),
            Event(at=4, kind="resume"),
        ),
        exercises=("session_after_abort",),
    ),
)

FULL = Entry(
    id="session-full",
    title="Let a request of a session run on the entry of req_to_token that the session keeps",
    rule="engine.hang",
    buggy="0.5.22 -",
    trigger="--enable-streaming-session, and as many open sessions as requests may run",
    remedy=Patch(
        name="own-entries-count",
        edits=(
            Edit(
                target=_PREFILL,
                match="self.get_num_allocatable_reqs(running_bs, running_batch=running_batch) <= 0",
                replacement="self.get_num_allocatable_reqs(\n"
                "    running_bs,\n"
                "    running_batch=running_batch,\n"
                f"    num_held_rows=sum({_ON_ITS_OWN.format('r')} for r in self.waiting_queue),\n"
                ") <= 0",
            ),
            Edit(
                target=_PREFILL,
                match="num_held_rows = sum(r.kv.holds_kv for r in adder.can_run_list)",
                replacement="num_held_rows = sum(r.kv.holds_kv for r in adder.can_run_list)\n"
                f"num_held_rows += {_ON_ITS_OWN.format('req')}",
            ),
        ),
        otherwise=(  # 0.5.22 counts no entries that requests hold
            Edit(
                target=_PREFILL,
                match="self.get_num_allocatable_reqs(running_bs, running_batch=running_batch) <= 0",
                replacement="self.get_num_allocatable_reqs(running_bs, running_batch=running_batch) + sum(\n"
                f"    {_ON_ITS_OWN.format('r')} for r in self.waiting_queue\n"
                ") <= 0",
            ),
            Edit(
                target=_PREFILL,
                match="if len(adder.can_run_list) >= self.get_num_allocatable_reqs(\n"
                "            running_bs,\n"
                "            candidate_beam_width,\n"
                "            running_batch=running_batch,\n"
                "        ):",
                replacement="if len(adder.can_run_list) >= self.get_num_allocatable_reqs(\n"
                "    running_bs, candidate_beam_width, running_batch=running_batch\n"
                f") + sum({_ON_ITS_OWN.format('r')} for r in (*adder.can_run_list, req)):",
            ),
        ),
    ),
    case=replace(
        _CASE,
        requests=(replace(_FIRST, max_new_tokens=1), replace(_NEXT, max_new_tokens=1)),
        exercises=(),
        engine=EngineSettings(sglang=replace(_SETTINGS, max_running_requests=1)),
    ),
)

ADAPTER = Entry(
    id="session-adapter",
    title="Go on behind no rows of a session that were computed with another adapter",
    rule="target.kv",
    buggy="0.5.22 -",
    trigger="--enable-streaming-session and --enable-lora, and a request of a session that had another adapter before",
    remedy=Patch(
        name="rows-of-one-adapter",
        edits=(
            Edit(
                target=f"{_SESSION}.take",
                match="slot = SessionSlot(kv=req.kv, publishes_prompt=True)",
                replacement="slot = SessionSlot(kv=req.kv, publishes_prompt=True)\nslot.lora_id = req.lora_id",
            ),
            Edit(
                target=f"{_SESSION}.try_match_prefix",
                match="req = params.req",
                replacement="req = params.req\n"
                "if slot.lora_id != req.lora_id:\n"
                "    self.release_session(req.session.session_id)\n"
                "    return None",
            ),
        ),
    ),
    case=replace(_CASE, requests=(replace(_FIRST, adapter=Adapter()), _NEXT), exercises=()),
)

HIDDEN = Entry(
    id="session-hidden",
    title="Give a request of a session the hidden state that its own last token was chosen by",
    rule="output.hidden",
    buggy="0.5.22 -",
    trigger='--enable-streaming-session, and a request of a session with return_hidden_states="last"',
    remedy=Patch(
        name="states-before-the-end-of-a-turn",
        edits=(
            Edit(target=_DECODE, match=_FINISH, replacement="\n"),
            Edit(
                target=_DECODE,
                match="if req.grammar is not None:",
                replacement=f"""# Ends a turn of a session, which cuts output_ids to finished_len: values
# counted from the end of output_ids must be collected before.
{_FINISH}if req.grammar is not None:""",
            ),
        ),
    ),
    case=replace(
        _CASE, requests=(Request(id="a", prompt=(49,), max_new_tokens=2, hidden_states="last", session="s"),), exercises=()
    ),
)

ENTRIES = (LAST_TOKEN, RETRACTED, WAITING, FULL, ADAPTER, HIDDEN)
