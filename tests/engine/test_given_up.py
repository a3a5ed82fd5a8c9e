"""Requests that the scheduler gives up: `schedule.events` where the pool has room for them, and `unknown` where it may not."""

import pytest
from msgspec.structs import replace

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.core.case import Case, Event, Grammar
from eagletwin.harness.core.patch import Edit
from eagletwin.harness.core.records import Record
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.engines.host import Host
from eagletwin.harness.judge.judge import judge

from ..rows import spread
from .conftest import Runner

ENTRY = LEDGER["host-abort"]
A, B = ENTRY.case.requests
UNKNOWN = "the scheduler aborted request b before its end"
# SGLang gives a request up that has the pool for itself
WITHOUT_CAUSE = Edit(
    target="sglang.srt.managers.scheduler.Scheduler.update_running_batch",
    match="kv_full_retract_flag = not batch.check_decode_mem()",
    replacement="batch.check_decode_mem = lambda **_: False\nkv_full_retract_flag = True",
)


def pool(case: Case, **changed: object) -> Case:
    return replace(case, engine=replace(case.engine, sglang=replace(case.engine.sglang, **changed)))


@pytest.fixture(scope="module")
def given_up(overlapped: Host, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """With the overlap scheduler, which a server has."""
    return overlapped.engine(ENTRY.case).run(ENTRY.case, tmp_path_factory.mktemp("given-up"))


def test_rows_that_are_locked_for_their_copy_alone_are_no_reason(run: Runner) -> None:
    """Live: b is aborted in its first round, while the rows of a, which has ended, are on their way to the host."""
    assert ENTRY.remedy is not None
    trace, verdict = run(ENTRY.case)
    assert (verdict.status, verdict.rule) == ("diverged", "schedule.events"), verdict
    assert verdict.first is not None
    assert (verdict.first.index, verdict.first.expected, verdict.first.actual) == ("end of b", "one that finished", "an abort")
    assert _tokens(trace, "b") == 0
    mended, equal = run(ENTRY.case, *ENTRY.remedy.edits)
    assert equal.status == "equal", equal
    assert _tokens(mended, "b") == 3
    assert "host_written" in equal.exercised


@pytest.mark.parametrize(
    "changed",
    spread(
        [
            {"host_pages": 0},
            {"max_total_tokens": 128},
            {"host_policy": "write_back"},
            {"host_policy": "write_through_selective"},
        ]
    ),
    ids=str,
)
def test_it_takes_rows_under_way_and_a_pool_that_they_nearly_fill(run: Runner, changed: dict[str, object]) -> None:
    _, verdict = run(pool(ENTRY.case, **changed))
    assert verdict.status == "equal", verdict


def test_with_overlap_as_well(given_up: Trace) -> None:
    verdict = judge(given_up)
    assert (verdict.status, verdict.rule) == ("diverged", "schedule.events"), verdict
    assert judge(given_up, frozenset({"schedule.events"})).reason == UNKNOWN


@pytest.mark.long
@pytest.mark.parametrize("radix_cache", [True, False])
def test_a_request_with_the_pool_for_itself_is_not_given_up(run: Runner, radix_cache: bool) -> None:
    alone = replace(pool(ENTRY.case, host_pages=0, radix_cache=radix_cache), requests=(B,))
    assert run(alone)[1].status == "equal"
    _, verdict = run(alone, WITHOUT_CAUSE)
    assert (verdict.status, verdict.rule) == ("diverged", "schedule.events"), verdict


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        replace(ENTRY.case, requests=(A, replace(B, max_new_tokens=20))),  # 65 rows with those set aside, of 64
        replace(ENTRY.case, requests=(A, replace(B, grammar=Grammar(rules=("a*",))))),
        replace(ENTRY.case, requests=(A, replace(B, session="s"))),
        replace(ENTRY.case, events=(Event(at=2, kind="abort", request="a"),)),
    ],
    ids=["its tokens may not fit", "its grammar may have refused a token", "a session", "another one was aborted then"],
)
def test_where_it_is_not_certain_nothing_is_said(run: Runner, case: Case) -> None:
    trace, _ = run(ENTRY.case)
    verdict = judge(_of(trace, case=case))
    assert "schedule.events" not in {verdict.rule, *verdict.later}, verdict


def test_another_request_that_has_rows_is_a_reason(given_up: Trace) -> None:
    [end] = [record for record in given_up.header.records if (record.stage, record.request) == ("finished", "b")]

    def living(record: Record) -> Record:
        if record.stage != "iteration" or record.iteration != end.iteration:
            return record
        return replace(record, numbers=record.numbers | {"live": 1})

    def at_once(record: Record) -> Record:
        other = (record.stage, record.request) == ("finished", "a")
        return replace(record, iteration=end.iteration) if other else record

    for change in (living, at_once):
        verdict = judge(_of(given_up, records=[change(record) for record in given_up.header.records]))
        assert (verdict.status, verdict.reason) == ("unknown", UNKNOWN), verdict


def test_a_pool_that_is_too_small_for_a_request_is_a_reason(run: Runner) -> None:
    """SGLang's own answer: it is given up, and what is right is not known."""
    large = replace(B, prompt=tuple(range(1, 29)), max_new_tokens=12)
    case = replace(pool(ENTRY.case, host_pages=0), requests=(large,))
    _, verdict = run(case, WITHOUT_CAUSE)
    assert (verdict.status, verdict.reason) == ("unknown", UNKNOWN), verdict


def _of(trace: Trace, **changed: object) -> Trace:
    return Trace(replace(trace.header, **changed), trace.tensors)


def _tokens(trace: Trace, name: str) -> int:
    numbers = [n for n, one in enumerate(trace.header.records) if (one.stage, one.request) == ("finished", name)]
    [number] = numbers
    return len(trace.integers(number, "tokens"))
