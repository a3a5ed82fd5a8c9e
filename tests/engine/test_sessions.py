"""Streaming sessions: requests that go on behind the rows that a session keeps, on the real scheduler.

As released, the first number that is wrong in a session is what `session-last-token` is about: cases run with its remedy.
"""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from eagletwin.cases.ledger import LEDGER
from eagletwin.cases.ledger.session import FULL, HIDDEN, LAST_TOKEN, RETRACTED, WAITING
from eagletwin.harness.core.case import Case, EngineSettings, Event, Request, SGLangSettings
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.run_spec import CPU
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.engines.host import Host
from eagletwin.harness.families.dimensions import FEATURES
from eagletwin.harness.judge.judge import judge

from ..rows import spread
from .conftest import Runner

PROMPT = tuple((31 * i + 5) % 90 for i in range(11))
CASE = Case(
    name="sessions",
    model="llama-tiny",
    num_steps=3,
    page_size=4,
    requests=(
        Request(id="a", prompt=PROMPT, max_new_tokens=6, session="s"),
        Request(id="x", prompt=PROMPT[:5], max_new_tokens=9, arrive=2),
        Request(id="b", prompt=(7, 8), max_new_tokens=7, session="s"),
        Request(id="c", prompt=(9,), max_new_tokens=8, session="s", arrive=14),
        Request(id="d", prompt=(3, 4, 5), max_new_tokens=4, session="s"),
    ),
    events=(Event(at=16, kind="close", session="s"),),
    engine=EngineSettings(sglang=SGLangSettings(radix_cache=True, max_total_tokens=512)),
)
# a turn is aborted, one comes after it, and one is retracted
DISTURBED = replace(
    CASE,
    events=(
        Event(at=1, kind="abort", request="a"),
        Event(at=5, kind="retract"),
        Event(at=6, kind="retract"),
        Event(at=40, kind="close", session="s"),
    ),
)
REMEDIES = tuple(edit for entry in (LAST_TOKEN, RETRACTED, FULL) for edit in entry.remedy.edits)
SESSION = "sglang.srt.session.streaming_session.StreamingSession"
CONTROLLER = "sglang.srt.session.session_controller"

# Fault -> its edit, on top of the remedies, and the rule that names it first.
PLANTED: dict[str, tuple[Edit, str]] = {
    "rows that a session could keep are computed again": (
        Edit(target=f"{SESSION}.try_cache_finished_req", match="min(target - 1, slot", replacement="min(target - 5, slot"),
        "session.rows",
    ),
    "one committed token too few is kept (#28754)": (
        Edit(target=f"{SESSION}.try_cache_finished_req", match="min(target - 1, slot", replacement="min(target - 2, slot"),
        "session.rows",
    ),
    "the answer is said twice": (
        Edit(
            target=f"{CONTROLLER}.Session._share_token_arrays",
            match="input_ids.extend(out_tail)",
            replacement="input_ids.extend(out_tail * 2)",
        ),
        "target.inputs",
    ),
    "the answer is forgotten": (
        Edit(
            target=f"{CONTROLLER}.Session._share_token_arrays",
            match="out_tail = last_req.output_ids[: last_req.sampling_params.max_new_tokens]",
            replacement="out_tail = last_req.output_ids[:0]",
        ),
        "session.rows",
    ),
    "a session that is closed gives nothing back": (
        Edit(
            target=f"{SESSION}.release_session",
            match="self.cache.free_kv_row(slot.kv, [(protected_len, slot.kv.kv_allocated_len)])",
            replacement="pass",
        ),
        "pool.accounting",
    ),
    "a session that is closed leaves its prefix locked": (
        Edit(target=f"{SESSION}.release_session", match="self.cache.unlock(slot.lock)", replacement="pass"),
        "pool.accounting",
    ),
    "a session is closed under its running request": (
        Edit(
            target=f"{CONTROLLER}.SessionController._close",
            match="if session.streaming and session._inflight:",
            replacement="if False:",
        ),
        "draft.slots",
    ),
    "a session that waits to be closed stays open": (
        Edit(target=f"{CONTROLLER}.SessionController.maybe_reap", match="for sid in pending:", replacement="for sid in ():"),
        "target.inputs",
    ),
    "slots behind the answer are lost": (
        Edit(
            target=f"{SESSION}._trim_overshoot",
            match="self._free_kv_aligned(req.kv, target, req.kv.kv_allocated_len)",
            replacement="pass",
        ),
        "pool.accounting",
    ),
    "a session's slots are free while it waits": (
        Edit(
            target=f"{SESSION}.try_cache_finished_req",
            match="slot.publishes_prompt = False",
            replacement="slot.publishes_prompt = False\n"
            "table = self.cache.req_to_token_pool.req_to_token\n"
            "self.cache.token_to_kv_pool_allocator.free(table[slot.kv.req_pool_idx, 8:12])",
        ),
        "pool.accounting",
    ),
}


def test_requests_of_a_session_go_on_behind_its_rows(run: Runner) -> None:
    _, verdict = run(CASE, *REMEDIES)
    assert verdict.status == "equal", (verdict.rule, verdict.reason, verdict.first)
    assert {"session_goes_on", "session_in_page", "session_cut", "session_waits_to_close", "session_again"} <= {
        *verdict.exercised
    }
    assert verdict.checked["session.rows"]


@pytest.mark.long
def test_a_request_of_a_session_that_may_not_end_yet_goes_on_behind_its_rows(run: Runner) -> None:
    """SGLang asks the tokenizer, which it has then, with which token a session begins."""
    case = replace(CASE, requests=tuple(replace(one, min_new_tokens=4, stop=tuple(range(48))) for one in CASE.requests))
    penalties = LEDGER["penalties"].remedy
    assert penalties is not None
    _, verdict = run(case, *REMEDIES, *penalties.edits)
    assert verdict.status == "equal", (verdict.rule, verdict.reason, verdict.first)
    assert {"session_goes_on", "held_back"} <= {*verdict.exercised}


def test_the_candidate_fix_keeps_nothing_of_a_single_token_without_an_answer(run: Runner) -> None:
    requests = (
        Request(id="a", prompt=(49,), max_new_tokens=0, session="s"),
        Request(id="b", prompt=(4, 5), max_new_tokens=2, session="s"),
    )
    trace, verdict = run(replace(CASE, requests=requests, events=()), *REMEDIES)
    assert verdict.status == "equal", (verdict.rule, verdict.reason, verdict.first)
    first = next(one for one in trace.header.records if (one.stage, one.request) == ("prefill", "b"))
    assert (first.numbers["start"], first.numbers["end"]) == (0, 3)


def test_aborted_and_retracted_requests_leave_a_session_as_it_was(run: Runner) -> None:
    _, verdict = run(DISTURBED, *REMEDIES)
    assert verdict.status == "equal", (verdict.rule, verdict.reason, verdict.first)
    assert {"session_after_abort", "session_retracted", "session_goes_on"} <= {*verdict.exercised}


# `a` ends, and `b` goes on behind it; nothing else is there
TURNS = replace(
    CASE,
    num_steps=1,
    page_size=1,
    requests=(
        Request(id="a", prompt=(1, 2, 3), max_new_tokens=2, session="s"),
        Request(id="b", prompt=(4,), max_new_tokens=2, session="s", arrive=6),
    ),
    events=(),
)


def start_of_b(trace: Trace) -> int:
    first = next(one for one in trace.header.records if (one.stage, one.request) == ("prefill", "b"))
    return first.numbers["start"]


def test_a_flush_in_a_pause_takes_the_rows_of_a_session_whose_next_request_waits(run: Runner) -> None:
    """As SGLang does not ask then whether requests wait. Without the pause it refuses the flush, and the rows stay."""
    flush = Event(at=7, kind="flush")
    paused = replace(TURNS, events=(Event(at=6, kind="pause"), flush, Event(at=7, kind="resume")))
    lost, verdict = run(paused, *REMEDIES)
    assert verdict.status == "equal", (verdict.rule, verdict.reason, verdict.first)
    assert start_of_b(lost) == 0
    resumed = replace(TURNS, events=(Event(at=6, kind="pause"), Event(at=7, kind="resume"), flush))
    trace, verdict = run(resumed, *REMEDIES)
    assert verdict.status == "equal", (verdict.rule, verdict.reason, verdict.first)
    assert start_of_b(trace) == 4
    header = replace(lost.header, case=resumed)
    assert judge(Trace(header, lost.tensors)).rule == "session.rows"


@pytest.mark.long
def test_with_overlap_a_flush_when_an_end_is_seen_takes_the_rows_of_its_session(overlapped: Host, tmp_path: Path) -> None:
    """No batch ran in the iteration before. Without overlap one did, and SGLang refuses the flush."""
    patches = (Patch(name="remedies", edits=REMEDIES),)
    for host, name, at, start in ((overlapped, "overlap", 3, 0), (overlapped.beside(mode=CPU), "no overlap", 2, 4)):
        case = replace(TURNS, events=(Event(at=at, kind="flush"),))
        (tmp_path / name).mkdir()
        trace = host.engine(case, patches).run(case, tmp_path / name)
        ended = next(one for one in trace.header.records if (one.stage, one.request) == ("finished", "a"))
        assert ended.iteration == at
        verdict = judge(trace)
        assert verdict.status == "equal", (name, verdict.rule, verdict.reason, verdict.first)
        assert start_of_b(trace) == start, name


@pytest.mark.parametrize("fault", spread(sorted(PLANTED), lambda fault: PLANTED[fault][-1].partition(".")[0]))
def test_a_planted_fault_is_named_by_its_rule(run: Runner, fault: str) -> None:
    edit, rule = PLANTED[fault]
    _, verdict = run(CASE, *REMEDIES, edit)
    assert (verdict.status, verdict.rule) == ("diverged", rule), (verdict.reason, verdict.first)


@pytest.mark.long
def test_rows_that_are_computed_again_are_seen_by_no_other_rule(run: Runner) -> None:
    edit, rule = PLANTED["rows that a session could keep are computed again"]
    trace, verdict = run(CASE, *REMEDIES, edit)
    assert verdict.rule == rule
    assert judge(trace, frozenset({rule})).status == "equal"


def test_as_released_a_row_that_nobody_computed_is_read_and_changes_the_output(run: Runner) -> None:
    requests = (
        Request(id="a", prompt=(1, 2, 3), max_new_tokens=4, session="s"),  # its last token is the bonus token of its last round
        Request(id="b", prompt=(4,), max_new_tokens=8, session="s"),
    )
    trace, verdict = run(replace(CASE, num_steps=2, page_size=1, requests=requests, events=()))
    assert verdict.rule == "session.rows"
    otherwise = judge(trace, frozenset({"session.rows"}))
    assert (otherwise.rule, "output.tokens" in otherwise.later) == ("target.kv", True)


def test_a_trace_that_does_not_say_when_a_request_was_handed_in_is_unknown(run: Runner) -> None:
    trace, _ = run(CASE, *REMEDIES)
    number = next(n for n, record in enumerate(trace.header.records) if record.stage == "session" and record.request == "b")
    records = tuple(record for n, record in enumerate(trace.header.records) if n != number)
    tensors = {_without(number, name): tensor for name, tensor in trace.tensors.items() if not name.startswith(f"{number}.")}
    assert judge(Trace(replace(trace.header, records=records), tensors)).status != "equal"


def _without(number: int, name: str) -> str:
    """The name of a tensor of a later record, once record `number` is gone."""
    record, _, rest = name.partition(".")
    return f"{int(record) - (int(record) > number)}.{rest}"


def test_every_feature_of_sessions_is_asked_for_here() -> None:
    named = {"session_goes_on", "session_in_page", "session_cut", "session_waits_to_close", "session_again"}
    named |= {"session_after_abort", "session_retracted"}
    assert named == {name for name in FEATURES if name.startswith("session_")}


def test_a_retraction_counts_where_the_session_keeps_all_rows_of_the_prompt(run: Runner) -> None:
    """The prefill after it begins where the one before ended, as another chunk would. Without its event, a retraction is one
    for want of slots."""
    case = Case(
        name="retracted-behind-its-prefill",
        model="llama-tiny",
        num_steps=1,
        requests=(Request(id="a", prompt=(1, 2, 3), max_new_tokens=4, session="s"),),
        events=(Event(at=1, kind="pause"), Event(at=1, kind="retract"), Event(at=3, kind="resume")),
        engine=EngineSettings(sglang=SGLangSettings(radix_cache=True)),
    )
    trace, verdict = run(case)
    assert verdict.status == "equal"
    header = replace(trace.header, case=replace(case, events=()))
    assert judge(Trace(header, trace.tensors)).status == "equal"
    finished = next(record for record in header.records if record.stage == "finished")
    assert finished.numbers["retractions"] == 1
    told = tuple(
        replace(record, numbers={**record.numbers, "retractions": 0}) if record is finished else record
        for record in header.records
    )
    assert judge(Trace(replace(header, records=told), trace.tensors)).rule == "output.counts"


def test_the_candidate_fix_leaves_a_request_its_rows_that_is_aborted_as_it_runs_again(run: Runner) -> None:
    """Retracted between chunks, and aborted between later ones: the rows are the request's then, not the session's."""
    case = Case(
        name="aborted-between-chunks",
        model="llama-tiny",
        num_steps=1,
        requests=(
            Request(id="a", prompt=(71, 49, 52, 15, 75, 59, 86), max_new_tokens=5, arrive=3),
            Request(id="b", prompt=(41, 51, 24, 29, 38, 61, 18, 20), max_new_tokens=7, arrive=2, session="s"),
        ),
        chunks=(3, 1, 5, 4, 1, 2, 3, 1, 1, 1, 1, 1),
        events=(*[Event(at=3, kind="retract")] * 3, Event(at=6, kind="abort", request="b")),
        engine=EngineSettings(sglang=SGLangSettings(radix_cache=True)),
    )
    assert WAITING.remedy is not None
    assert run(case, *WAITING.remedy.edits)[1].status == "equal"


def test_a_chunk_behind_all_tokens_of_its_request_is_judged(run: Runner) -> None:
    """SGLang prefills the last turn behind rows that its own prompt has, so that its chunk ends behind all that it has."""
    case = Case(
        name="behind-all",
        model="llama-tiny",
        num_steps=2,
        chunks=(16, 16, 20, 8, 4, 8, 12, 24, 16),
        requests=(
            Request(id="a", prompt=(2, 25), max_new_tokens=2, arrive=1, session="s"),
            Request(id="b", prompt=(1, 60, 14), max_new_tokens=10, arrive=4, session="s"),
            Request(id="c", prompt=(1, 60, 14, 67, 40, 54, 6), max_new_tokens=2, session="s"),
        ),
        events=(Event(at=7, kind="retract"), Event(at=9, kind="abort", request="b")),
        engine=EngineSettings(sglang=SGLangSettings(radix_cache=True, max_total_tokens=572)),
    )
    _, verdict = run(case)
    assert (verdict.status, verdict.rule, verdict.reason) == ("diverged", "session.rows", "")


# Its first round commits five tokens, of which three are sent. How it ends -> what the request says of that.
BEHIND: dict[str, dict[str, Any]] = {
    "behind a length": {"max_new_tokens": 4},
    "behind a stop": {"max_new_tokens": 12, "stop": (22,)},
    "streamed": {"max_new_tokens": 4, "stream": True},
}


@pytest.mark.parametrize("end", spread(sorted(BEHIND)))
def test_the_last_state_is_that_of_the_last_token_that_is_sent_with_the_candidate_fix(run: Runner, end: str) -> None:
    [request] = HIDDEN.case.requests
    request = replace(request, **BEHIND[end])
    case = replace(HIDDEN.case, num_steps=4, requests=(request,))
    assert HIDDEN.remedy is not None
    trace, verdict = run(case, *HIDDEN.remedy.edits)
    assert verdict.status == "equal", (verdict.rule, verdict.reason, verdict.first)
    records = trace.header.records
    assert [record.numbers["accept_len"] for record in records if record.stage == "verify"] == [5]
    assert [trace.integers(n, "tokens") for n, one in enumerate(records) if one.stage == "finished"] == [[54, 32, 81, 22]]
    _, verdict = run(case)
    assert (verdict.status, verdict.rule) == ("diverged", "output.hidden"), (verdict.reason, verdict.first)


@pytest.mark.parametrize("other", [{"session": ""}, {"hidden_states": "all"}], ids=["no session", "all states"])
def test_without_a_session_and_of_all_tokens_the_states_are_right_as_released(run: Runner, other: dict[str, Any]) -> None:
    [request] = HIDDEN.case.requests
    case = replace(HIDDEN.case, num_steps=4, requests=(replace(request, max_new_tokens=4, **other),))
    _, verdict = run(case)
    assert verdict.status == "equal", (verdict.rule, verdict.reason, verdict.first)
    assert verdict.checked["output.hidden"]
