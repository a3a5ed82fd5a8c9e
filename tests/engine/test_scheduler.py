"""What befalls the scheduler: events, retractions, overlap, requests that it gives up, and what must not show."""

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from eagletwin.cases.ledger import LEDGER, patches_of
from eagletwin.harness.core.case import Case, EngineSettings, Event, Grammar, Request, SGLangSettings
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.records import Record
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.engines.host import Host
from eagletwin.harness.judge.judge import judge

from ..rows import long, spread
from .conftest import Runner
from .test_mixed_chunks import CASE as MIXED

# What befalls the scheduler: it must have its effect, and an event that is ignored is seen.


SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"

EVENTS = Case(
    name="events",
    model="llama-tiny",
    num_steps=2,
    chunks=(4, 5, 7),
    requests=(
        Request(id="a", prompt=tuple(range(40, 53)), max_new_tokens=16),
        Request(id="b", prompt=(3, 1, 4, 1, 5), max_new_tokens=16),
        Request(id="c", prompt=(2, 7, 1, 8, 2, 8), max_new_tokens=4, arrive=34),
    ),
    events=(
        Event(at=5, kind="retract"),
        Event(at=7, kind="pause"),
        Event(at=9, kind="resume"),
        Event(at=10, kind="abort", request="b"),
    ),
    exercises=("retraction", "retraction_in_decode", "abort_in_decode", "chunked_prefill", "shared_chunk"),
    engine=EngineSettings(sglang=SGLangSettings(radix_cache=True)),
)
FLUSH = Case(
    name="flush",
    model="llama-tiny",
    num_steps=1,
    requests=(
        Request(id="a", prompt=(3, 1, 4, 1, 5), max_new_tokens=2),
        Request(id="b", prompt=(3, 1, 4, 1, 5, 9), max_new_tokens=2, arrive=12),
    ),
    events=(Event(at=9, kind="flush"),),
    engine=EngineSettings(sglang=SGLangSettings(radix_cache=True)),
)

IGNORED = {
    "every abort": (EVENTS, "abort_request", "if (chunked_req := self.chunked_req) is not None:", "return\n{}", "abort of b"),
    "aborts of what runs": (
        EVENTS,
        "abort_request",
        "for req in self.collect_inflight_reqs():",
        "for req in []:",
        "abort of b",
    ),
    "the pause": (
        EVENTS,
        "pause_generation",
        'if recv_req.mode == "in_place":',
        "{}\n    self._engine_paused = False",
        "pause until iteration 9",
    ),
    "the retraction": (
        EVENTS,
        "pause_generation",
        "if self.enable_overlap and self.last_batch:",
        "return\n{}",
        "retraction of a",
    ),
    "the flush": (FLUSH, "flush_cache", "self.tree_cache.reset()", "return True\n{}", "slots in the cache after the flush"),
}


@pytest.mark.parametrize("case", [EVENTS, FLUSH], ids=lambda case: case.name)
def test_events_on_the_unmodified_release_are_equal(run: Runner, case: Case) -> None:
    _, verdict = run(case)
    assert verdict.status == "equal", verdict
    assert verdict.checked["schedule.events"] >= len(case.events) - 1


@pytest.mark.parametrize("ignored", sorted(IGNORED))
def test_a_scheduler_that_ignores_an_event_diverges(run: Runner, ignored: str) -> None:
    case, function, match, replacement, index = IGNORED[ignored]
    edit = Edit(target=f"{SCHEDULER}.{function}", match=match, replacement=replacement.format(match))
    _, verdict = run(case, edit)
    assert (verdict.status, verdict.rule) == ("diverged", "schedule.events"), verdict
    assert verdict.first is not None
    assert verdict.first.index == index


# A pool so small that the scheduler takes requests' slots away and prefills them again: legal, and judged as such.


# (num_steps, page_size, radix cache, pool): SGLang's admission leaves out what speculation reserves, and so must retract.
TIGHT = [(5, 4, False, 64), (5, 4, True, 64), (16, 1, False, 128), (16, 1, True, 128)]


@pytest.mark.parametrize(("num_steps", "page_size", "radix_cache", "pool"), spread(TIGHT, lambda row: row[1]))
def test_a_retracted_request_is_equal(run: Runner, num_steps: int, page_size: int, radix_cache: bool, pool: int) -> None:
    requests = tuple(
        Request(id=f"q{n}", prompt=tuple((17 * n + 31 * i + 5 * i * n) % 96 for i in range(5 + n)), max_new_tokens=8)
        for n in range(6)
    )
    case = Case(
        name="tight",
        model="llama-tiny",
        num_steps=num_steps,
        page_size=page_size,
        requests=requests,
        exercises=("retraction",),
        engine=EngineSettings(sglang=SGLangSettings(radix_cache=radix_cache, max_total_tokens=pool)),
    )
    _, verdict = run(case)
    assert verdict.status == "equal", verdict


@pytest.mark.parametrize(
    ("page_size", "chunk", "at"),
    [(1, 64, 1), (4, 64, 1), (1, 8, 2), (1, 8, 3)],
    ids=["whole", "in pages", "in chunks", "behind"],
)
def test_a_retraction_before_the_first_verify_is_one_where_the_request_comes_back_to_a_prefix(
    run: Runner, busy_case: Case, page_size: int, chunk: int, at: int
) -> None:
    """It begins anew behind what the prefix cache has, and so at a place where no chunk of its own began."""
    request = replace(busy_case.requests[0], prompt=busy_case.requests[0].prompt[:18])
    case = replace(
        busy_case,
        requests=(request,),
        page_size=page_size,
        chunked_prefill_size=chunk,
        events=(Event(at=at, kind="retract"),),
        exercises=("retraction",),
    )
    trace, verdict = run(case)
    [ended] = [record.numbers for record in trace.header.records if record.stage == "finished"]
    assert ended["retractions"] == 1
    assert verdict.status == "equal", verdict
    assert "radix_hit" not in verdict.exercised  # its own rows, and no other request's


# What must not show: chunks, pages, batch mates and the prefix cache change neither output nor stored rows.


@pytest.mark.parametrize(("chunk", "page_size"), [(16, 16), (64, 4), *long((16, 1), (16, 4), (64, 1), (64, 16))])
def test_output_and_rounds_do_not_depend_on_pages_chunks_or_the_cache(
    run: Runner, busy_case: Case, page_size: int, chunk: int
) -> None:
    alone = msgspec.structs.replace(
        busy_case,
        page_size=page_size,
        chunked_prefill_size=chunk,
        requests=busy_case.requests[:1],
        engine=EngineSettings(sglang=SGLangSettings(radix_cache=False, max_total_tokens=256)),
    )
    told = []
    for case in (busy_case, alone):
        trace, verdict = run(case)
        assert verdict.status == "equal"
        told.append(
            [
                (record.round, record.numbers["accept_len"], trace.tensor(number, "predicted").tolist())
                for number, record in enumerate(trace.header.records)
                if record.stage == "verify" and record.request == "a"
            ]
        )
    assert told[0] == told[1]


# The overlap scheduler on a CPU, where SGLang turns it off: a batch is launched before the last one is looked at.


def test_a_round_that_is_not_waited_for_is_recorded_and_judged(overlapped: Host, tmp_path: Path) -> None:
    prompts = {"a": (3, 5, 9, 11), "b": (13, 5, 9, 11)}
    case = Case(
        name="overlap",
        model="llama-tiny",
        num_steps=3,
        requests=tuple(Request(id=name, prompt=prompt, max_new_tokens=9) for name, prompt in prompts.items()),
        events=(Event(at=4, kind="retract"), Event(at=6, kind="abort", request="a")),
    )
    trace = overlapped.engine(case).run(case, tmp_path)
    assert trace.header.engine.overlap
    assert judge(trace).status == "equal"


def test_what_a_mixed_step_gave_last_is_not_in_the_list_yet_and_is_recorded(overlapped: Host, tmp_path: Path) -> None:
    case = replace(MIXED, requests=MIXED.requests[:2], exercises=("mixed_step", "accept_all"))
    verdict = judge(overlapped.engine(case).run(case, tmp_path))
    assert verdict.status == "equal", verdict


def test_an_abort_of_a_request_whose_step_a_retraction_took_has_one_step_more_and_no_other(
    overlapped: Host, tmp_path: Path
) -> None:
    """`a` is prefilled when the abort comes, and is retracted, for want of slots, before anybody looks at that."""
    case = Case(
        name="abort-and-retraction",
        model="llama-tiny",
        num_steps=4,
        topk=4,
        num_draft_tokens=5,
        page_size=4,
        requests=(
            Request(id="c", prompt=(95,), max_new_tokens=2),
            Request(id="a", prompt=(41,), max_new_tokens=7, arrive=1),
        ),
        events=(Event(at=2, kind="abort", request="a"),),
        exercises=("retraction",),
        engine=EngineSettings(sglang=SGLangSettings(max_total_tokens=80)),
    )
    finish = "sglang.srt.managers.schedule_batch.Req.update_finish_state"
    late = "if self.to_finish and setattr(self, 'late', getattr(self, 'late', 0) + 1) is None and self.late > 1:"
    fault = Patch(name="late-abort", edits=(Edit(target=finish, match="if self.to_finish:", replacement=late),))
    for name, patches, expected in (("released", (), ("equal", "")), ("late", (fault,), ("diverged", "schedule.events"))):
        (tmp_path / name).mkdir()
        verdict = judge(overlapped.engine(case, patches).run(case, tmp_path / name))
        assert (verdict.status, verdict.rule) == expected, verdict


@pytest.mark.long
def test_an_aborted_request_may_be_retracted_before_its_end_again_and_again(overlapped: Host, tmp_path: Path) -> None:
    """The pool holds one of the two: `b` is prefilled several times after its abort, and ends one step after the last."""
    case = Case(
        name="abort-and-retractions",
        model="llama-eagle3-full",
        num_steps=5,
        topk=2,
        num_draft_tokens=9,
        page_size=16,
        chunked_prefill_size=512,
        requests=(
            Request(id="a", prompt=tuple(range(10, 43)), max_new_tokens=16, arrive=3),
            Request(id="b", prompt=tuple(range(50, 79)), max_new_tokens=8, arrive=5),
        ),
        events=(Event(at=6, kind="abort", request="b"), Event(at=7, kind="retract")),
        engine=EngineSettings(sglang=SGLangSettings(max_running_requests=2, max_total_tokens=320)),
    )
    trace = overlapped.engine(case).run(case, tmp_path)
    prefills = [record for record in trace.header.records if record.stage == "prefill" and record.request == "b"]
    assert len(prefills) > 2
    assert judge(trace).status == "equal"


@pytest.mark.long
def test_the_result_of_a_last_chunk_may_be_lost_in_a_retraction(overlapped: Host, tmp_path: Path) -> None:
    """`c` finds no slots and is retracted when its prompt has just been prefilled to the end, before its first token is seen.
    Prefilled again, the layers look ahead to the end of the prompt and no further: nobody knows that token."""
    requests = (
        Request(id="b", prompt=(49,), max_new_tokens=8, arrive=6),
        Request(id="c", prompt=tuple(range(3, 27)), max_new_tokens=4, arrive=8),
        Request(id="e", prompt=tuple(range(40, 60)), max_new_tokens=7, arrive=8),
        Request(id="f", prompt=tuple(range(50, 74)), max_new_tokens=13),
    )
    case = Case(
        name="lost-prefill",
        model="llama-mtp-chain",
        num_steps=4,
        chunked_prefill_size=3,
        requests=requests,
        events=(Event(at=11, kind="retract"),),
        engine=EngineSettings(sglang=SGLangSettings(max_total_tokens=100)),
    )
    trace = overlapped.engine(case, patches_of(None, ["multi-layer-chunk-tail-2"], None)).run(case, tmp_path)
    ends = [record.numbers["end"] for record in trace.header.records if record.stage == "prefill" and record.request == "c"]
    assert ends.count(24) == 2  # the prompt's end, and no token behind it
    assert judge(trace).status == "equal"


BEHIND = LEDGER["overlap-context-end"]


@pytest.mark.parametrize(
    ("fix", "kernel"),
    spread(
        [
            ("indices-overflow", "generate_draft_decode_kv_indices"),
            ("pipeline-tail", "build_tree"),  # lists that reach, and the mask does not
            ("overlap-context-end", ""),
        ]
    ),
)
def test_a_round_behind_the_end_of_a_context_takes_the_mask_and_the_lists_of_slots_to_its_rows(
    overlapped: Host, tmp_path: Path, fix: str, kernel: str
) -> None:
    remedy = LEDGER[fix].remedy
    assert remedy is not None
    trace = overlapped.engine(BEHIND.case, (remedy,)).run(BEHIND.case, tmp_path)
    rounds = [one.numbers["new_seq_len"] for one in trace.header.records if one.stage == "verify"]
    assert rounds[-1] > BEHIND.case.engine.sglang.context_length
    verdict = judge(trace)
    assert (verdict.status, verdict.rule) == (("diverged", "kernel.memory") if kernel else ("equal", "")), verdict
    assert kernel in trace.header.ending.detail


def test_its_fix_is_that_of_the_lists_in_the_last_round_as_well(host: Host, tmp_path: Path) -> None:
    assert BEHIND.remedy is not None
    case = LEDGER["indices-overflow"].case
    assert judge(host.engine(case, (BEHIND.remedy,)).run(case, tmp_path)).status == "equal"


# Requests that the scheduler gives up: `schedule.events` where the pool has room for them, and `unknown` where it may not.


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
