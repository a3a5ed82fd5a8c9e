"""The overlap scheduler on a CPU, where SGLang turns it off: a batch is launched before the last one is looked at."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from eagletwin.cases.ledger import LEDGER, patches_of
from eagletwin.harness.core.case import Case, EngineSettings, Event, Request, SGLangSettings
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.engines.host import Host
from eagletwin.harness.judge.judge import judge

from ..rows import spread
from .test_mixed_chunks import CASE as MIXED


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
