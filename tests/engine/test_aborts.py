"""Aborts that come inside a step: between the launch of a batch and the look at its result, on the real scheduler."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from eagletwin.harness.core.case import Case, EngineSettings, Event, Request, SGLangSettings
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.records import Finish
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.core.verdict import Verdict
from eagletwin.harness.engines.host import Host
from eagletwin.harness.judge.judge import judge
from eagletwin.harness.page.timeline import timeline_of

from ..rows import spread
from .changes import without
from .conftest import Runner

PROMPT = tuple(range(40, 56))
# a: aborted in its second round; c: in a chunk that is not its last; e: in its prefill. d goes on with what a left cached.
CASE = Case(
    name="aborts-in-step",
    model="llama-tiny",
    num_steps=3,
    page_size=4,
    chunks=(8, 12, 12),
    requests=(
        Request(id="a", prompt=PROMPT, max_new_tokens=16, stream=True),
        Request(id="b", prompt=(3, 1, 4, 1, 5), max_new_tokens=14),
        Request(id="c", prompt=tuple(range(60, 72)), max_new_tokens=6, arrive=2),
        Request(id="e", prompt=(9, 8, 7), max_new_tokens=9, arrive=9, stream=True),
        Request(id="d", prompt=(*PROMPT, 7, 8), max_new_tokens=6, arrive=8),
    ),
    events=tuple(Event(at=0, kind="abort", request=name, step=step) for name, step in (("c", 1), ("a", 4), ("e", 1))),
    engine=EngineSettings(sglang=SGLangSettings(radix_cache=True, max_total_tokens=256)),
)
UNDER_WAY = ("abort_in_step", "abort_in_chunk", "result_of_nobody", "radix_hit")

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
DECODED = f"{RESULTS}.process_batch_result_decode"
FINISH = "sglang.srt.managers.schedule_batch.Req.update_finish_state"
TO_FINISH = "req.to_finish = FINISH_ABORT()"
OF_THE_ROW = "self.req_to_token_pool.req_to_token[{row}].to(torch.int64)"
RESERVED = OF_THE_ROW.format(row="req.kv.req_pool_idx, req.kv.kv_committed_len:req.kv.kv_allocated_len")

# Fault -> its edit, the rule, and where it shows
PLANTED = {
    "it has one step more": (
        Edit(
            target=FINISH,
            match="if self.to_finish:",
            replacement="if self.to_finish and vars(self).setdefault('late', []).append(0) is None and len(self.late) > 1:",
        ),
        "schedule.events",
        "abort of a in its step",
    ),
    "what was under way is not sent": (
        Edit(
            target=DECODED,
            match="req.output_ids.extend(next_token_id)",
            replacement="next_token_id = [] if req.to_finish else next_token_id\nreq.output_ids.extend(next_token_id)",
        ),
        "schedule.events",
        "tokens of a, aborted in its step",
    ),
    "it ends at once, and nobody looks at what is under way": (
        Edit(target=f"{SCHEDULER}.abort_request", match=TO_FINISH, replacement="req.finished_reason = FINISH_ABORT()"),
        "schedule.events",
        "tokens of a, aborted in its step",
    ),
    "a prefill that is under way is not looked for": (
        Edit(
            target=f"{SCHEDULER}.abort_request",
            match="for req in self.collect_inflight_reqs():",
            replacement="for req in self.running_batch.reqs:",
        ),
        "schedule.events",
        "abort of e in its step",
    ),
    "its slots are free while its round runs": (
        Edit(
            target=f"{SCHEDULER}.abort_request",
            match=TO_FINISH,
            replacement=f"{TO_FINISH}\nself.token_to_kv_pool_allocator.free({RESERVED})",
        ),
        "target.kv",
        "row 16, element 19, and 1 more rows",
    ),
    "its row of req_to_token is another's while its round runs": (
        Edit(
            target=f"{SCHEDULER}.abort_request",
            match=TO_FINISH,
            replacement=f"{TO_FINISH}\nself.req_to_token_pool.free_slots += [req.kv.req_pool_idx] if req.output_ids else []",
        ),
        "draft.slots",
        "column 0",
    ),
    "the result of nobody frees slots again": (
        Edit(
            target=DECODED,
            match="# And all the over-allocated tokens will be freed in `release_kv_cache`.",
            replacement=f"self.token_to_kv_pool_allocator.free({OF_THE_ROW.format(row='batch.req_pool_indices[i], 24:28')})",
        ),
        "pool.accounting",
        "slot 44",
    ),
    "its last page is freed, and kept in the prefix cache": (
        Edit(
            target=FINISH,
            match="self.finished_reason = self.to_finish",
            replacement="self.finished_reason = self.to_finish\nself.kv.kv_committed_len -= 4",
        ),
        "pool.accounting",
        "slot 0",
    ),
}


def ran(host: Host, folder: Path, *edits: Edit) -> tuple[Trace, Verdict]:
    trace = host.engine(CASE, (Patch(name="planted", edits=edits),) if edits else ()).run(CASE, folder)
    return trace, judge(trace)


@pytest.fixture(scope="module")
def released(overlapped: Host, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, Verdict]:
    return ran(overlapped, tmp_path_factory.mktemp("released"))


def ends(trace: Trace) -> dict[str, tuple[int, int]]:
    """Of each request why it ended, and how many tokens it got; one that was aborted in the queue has no reason."""
    return {
        record.request: (record.numbers.get("finish", -1), len(trace.integers(number, "tokens")))
        for number, record in enumerate(trace.header.records)
        if record.stage == "finished"
    }


def test_aborts_inside_a_step_are_equal_and_the_batch_under_way_gives_the_last_tokens(released: tuple[Trace, Verdict]) -> None:
    trace, verdict = released
    assert verdict.status == "equal", verdict
    assert set(UNDER_WAY) <= set(verdict.exercised)
    assert verdict.checked["schedule.events"] == 3
    came = {record.request: record.numbers for record in trace.header.records if record.stage == "abort"}
    assert all(numbers["launched"] == numbers["read"] + 1 for numbers in came.values())
    # a: of its prefill, a round, and the round under way; c between two chunks; e: of its prefill, which was under way
    rounds = [
        record.numbers["accept_len"] for record in trace.header.records if (record.request, record.stage) == ("a", "verify")
    ]
    assert len(rounds) == 3
    assert ends(trace) == {
        "a": (Finish.ABORT, 1 + sum(rounds[:2])),
        "b": (Finish.LENGTH, 14),
        "c": (-1, 0),
        "d": (Finish.LENGTH, 6),
        "e": (Finish.ABORT, 1),
    }


def test_the_page_has_an_abort_inside_a_step_where_the_scheduler_learned_of_it(released: tuple[Trace, Verdict]) -> None:
    trace, _ = released
    timeline = timeline_of(trace)
    [lane] = [lane for lane in timeline.lanes if lane.name == "a"]
    marks = [(timeline.columns[mark.at], mark.text) for mark in lane.marks if mark.kind == "event"]
    came = next(record for record in trace.header.records if (record.request, record.stage) == ("a", "abort"))
    assert marks == [(came.iteration, "abort")]


def test_without_overlap_a_step_has_ended_when_the_scheduler_learns_of_the_abort(run: Runner) -> None:
    trace, verdict = run(CASE)
    assert verdict.status == "equal", verdict
    assert "abort_in_step" not in verdict.exercised
    came = [record.numbers for record in trace.header.records if record.stage == "abort"]
    assert [numbers["launched"] - numbers["read"] for numbers in came] == [0, 0, 0]


@pytest.mark.parametrize("fault", spread(sorted(PLANTED), lambda fault: PLANTED[fault][1].partition(".")[0]))
def test_a_planted_fault_is_named(overlapped: Host, tmp_path: Path, fault: str) -> None:
    edit, rule, index = PLANTED[fault]
    _, verdict = ran(overlapped, tmp_path, edit)
    assert (verdict.status, verdict.rule) == ("diverged", rule), verdict
    assert verdict.first is not None
    assert verdict.first.index == index


def test_a_trace_that_does_not_say_what_was_under_way_is_unknown(released: tuple[Trace, Verdict]) -> None:
    trace, _ = released
    of_a = next(n for n, record in enumerate(trace.header.records) if (record.request, record.stage) == ("a", "abort"))
    verdict = judge(without(trace, lambda number, _: number == of_a))
    assert (verdict.status, "the abort of a in its step 4 was not recorded" in verdict.reason) == ("unknown", True)
    for numbers in ({"launched": 4, "read": 4}, {"launched": 5, "read": 3}, {"launched": 5, "read": 6}):
        record = replace(trace.header.records[of_a], numbers=numbers)
        records = (*trace.header.records[:of_a], record, *trace.header.records[of_a + 1 :])
        verdict = judge(Trace(replace(trace.header, records=records), trace.tensors))
        assert (verdict.status, "before the abort of a were not counted" in verdict.reason) == ("unknown", True)


@pytest.mark.long
def test_an_abort_between_chunks_of_a_request_whose_first_token_a_retraction_lost(overlapped: Host, tmp_path: Path) -> None:
    """It was prefilled to its end, and retracted before the token was counted. What it goes on with has the prompt alone, and
    so finds one row less in the cache than its sibling left there; no last chunk tells so, for it is aborted."""
    prompt = (79, 32, 94, 45, 88, 94, 83, 67, 3, 59, 31, 83, 6, 20, 14, 47)
    case = Case(
        name="lost-and-aborted",
        model="llama-tiny",
        num_steps=3,
        topk=3,
        num_draft_tokens=4,
        chunked_prefill_size=1,
        requests=(
            Request(id="b", prompt=(73, 10, 62), max_new_tokens=3, n=3),
            Request(id="c", prompt=prompt, max_new_tokens=4, n=3),
            Request(id="d", prompt=prompt[:4], max_new_tokens=4),
        ),
        events=(Event(at=0, kind="abort", request="c.3", step=3),),
        engine=EngineSettings(sglang=SGLangSettings(radix_cache=True, max_total_tokens=148)),
    )
    trace = overlapped.engine(case, ()).run(case, tmp_path)
    verdict = judge(trace)
    assert verdict.status == "equal", verdict
    assert verdict.checked["radix.hit"]
    records = tuple(
        replace(record, numbers=record.numbers | {"tokens": 0}) if "tokens" in record.numbers else record
        for record in trace.header.records
    )
    wrong = judge(Trace(replace(trace.header, records=records), trace.tensors))
    assert wrong.first is not None
    assert (wrong.rule, wrong.first.expected, wrong.first.actual) == ("radix.hit", "15", "14")
