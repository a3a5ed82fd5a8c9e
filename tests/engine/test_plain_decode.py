"""Plain decode of the same engine as a second oracle (`engine.sglang.plain_decode`), on the real workers.

All with the candidate fix of the entries `penalties`: without it verify counts few tokens, and plain decode says so."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.core.case import Bias, Case, EngineSettings, Event, Penalties, Request, SGLangSettings
from eagletwin.harness.core.patch import Edit
from eagletwin.harness.core.records import Record
from eagletwin.harness.core.run_spec import Mode
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.engines.host import Host, WouldNotStart
from eagletwin.harness.judge.judge import judge

from ..rows import long, spread
from .conftest import Runner, in_mode
from .test_asked import FIXED
from .test_asked import PENALTIES_PLANTED as PLANTED

PLAIN = EngineSettings(sglang=SGLangSettings(plain_decode=True))
CASE = Case(
    name="plain-decode",
    model="llama-tiny",
    num_steps=3,
    requests=(
        Request(id="p", prompt=(30,), max_new_tokens=14, penalties=Penalties(frequency=2, presence=-2, repetition=0.5)),
        Request(id="q", prompt=(24,), max_new_tokens=12, arrive=2, penalties=Penalties(repetition=2)),
        Request(id="b", prompt=(9,), max_new_tokens=9, arrive=3, logit_bias=(Bias(token=54, value=-100),)),
        Request(id="m", prompt=(16,), max_new_tokens=10, arrive=4, stop=tuple(range(20, 80)), min_new_tokens=4),
        Request(id="r", prompt=(58,), max_new_tokens=8, arrive=6, penalties=Penalties(frequency=0.7, repetition=0.5)),
    ),
    events=(Event(at=7, kind="retract"),),
    exercises=("penalized", "plain_decode_differs", "batch_grows", "retraction_in_decode"),
    engine=PLAIN,
)
DECODE = "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_decode"
COUNT = "if self.sampling_info.penalizer_orchestrator.is_required:"

# Faults of plain decode alone: verify is as it should be.
FAULTS = {
    "it counts nothing": Edit(target=DECODE, match=COUNT, replacement="if False:"),
    "it counts the prompt's last token": Edit(
        target="sglang.srt.managers.schedule_batch.ScheduleBatch.cumulate_penalty_output_tokens",
        match="req.output_ids[-1] if len(req.output_ids) else req.origin_input_ids[-1]",
        replacement="req.origin_input_ids[-1]",
    ),
    "it forgets the bias": Edit(target=DECODE, match=COUNT, replacement=f"self.sampling_info.logit_bias = None\n{COUNT}"),
    "it takes another request's penalties": Edit(
        target="sglang.srt.sampling.penaltylib.repetition_penalty.BatchedRepetitionPenalizer._apply",
        match="self.cumulated_repetition_penalties",
        replacement="self.cumulated_repetition_penalties.roll(1, 0)",
    ),
}


def said(trace: Trace) -> dict[str, list[int]]:
    return {one.request: trace.integers(n, "tokens") for n, one in enumerate(trace.header.records) if one.stage == "plain"}


def test_each_token_is_that_of_plain_decode_but_where_a_round_does_not_count_its_own(run: Runner) -> None:
    trace, verdict = run(CASE, *FIXED)
    assert verdict.status == "equal", verdict
    assert set(said(trace)) == {request.id for request in CASE.requests}
    assert verdict.relaxed > 0
    assert verdict.checked["output.plain"] == 2 * len(CASE.requests)


@pytest.mark.parametrize("fault", spread(sorted(FAULTS)))
def test_a_fault_of_plain_decode_is_named(run: Runner, fault: str) -> None:
    trace, verdict = run(replace(CASE, exercises=()), *FIXED, FAULTS[fault])
    assert (verdict.status, verdict.rule) == ("diverged", "output.plain"), (verdict, trace.header.ending)


@pytest.mark.long
@pytest.mark.parametrize("fault", ["the last token of each round alone is counted (live)", "verify leaves the scaling out"])
def test_what_verify_does_wrong_shows_without_the_rules_that_the_reference_decides(run: Runner, fault: str) -> None:
    trace, _ = run(replace(CASE, exercises=()), *PLANTED[fault][0])
    verdict = judge(trace, frozenset({"verify.accept", "output.tokens"}))
    assert (verdict.status, verdict.rule) == ("diverged", "output.plain")


def test_a_request_without_wishes_gets_what_plain_decode_says_in_trees_pages_and_chunks(run: Runner) -> None:
    request = Request(id="a", prompt=tuple(range(3, 25)), max_new_tokens=12)
    settings = SGLangSettings(plain_decode=True, radix_cache=True)
    case = Case(
        name="tree",
        model="llama-tiny",
        num_steps=3,
        topk=4,
        num_draft_tokens=8,
        page_size=4,
        chunked_prefill_size=8,
        requests=(request, replace(request, id="b", arrive=5)),
        engine=EngineSettings(sglang=settings),
    )
    trace, verdict = run(case)
    assert (verdict.status, verdict.relaxed) == ("equal", 0), verdict
    assert said(trace)["a"] == said(trace)["b"]


@pytest.mark.long
def test_an_answer_that_an_abort_lets_go_on_behind_a_stop_token(run: Runner) -> None:
    """SGLang cuts a round's tokens at a stop token when it looks for the end, and of an aborted request it has one already."""
    case = Case(
        name="abort-behind-a-stop",
        model="deepseek-nextn-yarn",
        num_steps=1,
        topk=8,
        num_draft_tokens=2,
        chunks=(3, 3, 5, 4, 5, 1, 2, 4, 1, 6, 3, 2),
        requests=(
            Request(
                id="a", prompt=(9, 51, 5, 75, 75, 29), max_new_tokens=6, stop=(8, 12, 15, 17, 26, 32, 48, 57, 60, 63, 72, 83)
            ),
        ),
        events=(Event(at=2, kind="retract"), Event(at=3, kind="abort", request="a")),
        exercises=("abort_in_decode",),
        engine=EngineSettings(sglang=SGLangSettings(plain_decode=True, radix_cache=True, max_total_tokens=152)),
    )
    trace, verdict = run(case)
    assert verdict.status == "equal", verdict
    sent = next(trace.integers(n, "tokens") for n, one in enumerate(trace.header.records) if one.stage == "finished")
    assert len(said(trace)["a"]) < len(sent)
    assert said(trace)["a"] == sent[: len(said(trace)["a"])]
    assert sent[len(said(trace)["a"]) - 1] in case.requests[0].stop


def test_a_trace_without_its_answers_is_not_whole(run: Runner) -> None:
    trace, _ = run(CASE, *FIXED)
    left: list[Record] = [record for record in trace.header.records if record.stage != "plain"]
    header = replace(trace.header, records=tuple(left))
    verdict = judge(Trace(header, trace.tensors))
    assert (verdict.status, "plain decode" in verdict.reason) == ("unknown", True)


def test_it_is_of_one_process_on_a_cpu(host: Host, tmp_path: Path) -> None:
    case = replace(CASE, model="gpt-oss-eagle3", engine=PLAIN)
    with in_mode(host, Mode(dtype="bfloat16")) as rounded, pytest.raises(WouldNotStart, match="plain decode of experts"):
        rounded.engine(case).run(case, tmp_path)


def test_an_entry_of_the_ledger_shows_in_plain_decode_too(run: Runner) -> None:
    """The fix of `penalties` makes verify count what plain decode counts."""
    entry = LEDGER["penalties"]
    _, red = run(replace(entry.case, engine=PLAIN))
    assert (red.status, red.rule, "output.plain" in red.later) == ("diverged", entry.rule, True)


@pytest.mark.parametrize(
    ("model", "prompt"),
    [
        *long(
            ("mimo-v2-window", (30, 75, 69, 16, 47, 77, 60, 80, 74)), ("step-3.5-window", (49, 53, 5, 33, 65, 62, 51, 38, 61))
        ),
        ("gpt-oss-eagle3", LEDGER["decode-window"].also[0].requests[0].prompt),
    ],
)
def test_plain_decode_reads_one_row_less_than_a_window_has(run: Runner, model: str, prompt: tuple[int, ...]) -> None:
    """Live: speculative decoding is right, and what SGLang sends without it is not."""
    entry, request = LEDGER["decode-window"], Request(id="a", prompt=prompt, max_new_tokens=8)
    case = Case(name="window", model=model, num_steps=1, requests=(request,), engine=PLAIN)
    _, red = run(case)
    assert (red.status, red.rule, set(red.later) - {"output.plain"}) == ("diverged", "output.plain", set())
    assert entry.remedy is not None
    _, green = run(case, *entry.remedy.edits)
    assert green.status == "equal"


# The engine of plain decode retracts a sample of e for want of slots, when its answer is long enough to end.
RETRACTED = Case(
    name="plain-decode-retracted",
    model="qwen3-eagle3-norm",
    num_steps=1,
    requests=(
        Request(
            id="a",
            prompt=(74, 24, 69, 45, 59, 6, 84, 64, 27, 77, 28, 36, 62, 88, 27, 42, 56, 9),
            max_new_tokens=11,
            arrive=2,
            n=3,
        ),
        Request(id="b", prompt=(92, 87, 19, 33, 86, 81, 12), max_new_tokens=8, arrive=8),
        Request(
            id="e",
            prompt=(
                *(74, 24, 73, 10, 62, 33, 4, 0, 18, 84, 75, 60, 94, 47, 40, 2, 34, 62),
                *(25, 93, 52, 68, 69, 87, 12, 24, 72, 70, 89, 93, 33, 84, 78, 87, 11, 54),
            ),
            max_new_tokens=6,
            arrive=6,
            stop=(8, 12, 15, 17, 26, 32, 48, 57, 60, 63, 72, 83),
            min_new_tokens=2,
            n=5,
        ),
        Request(
            id="f",
            prompt=(74, 24, 69, 45, 59, 6, 84, 64, 27, 77, 24, 54, 47, 6, 73, 2, 71, 5, 2, 95, 34, 47),
            max_new_tokens=6,
            arrive=4,
            n=3,
        ),
    ),
    engine=EngineSettings(sglang=SGLangSettings(max_total_tokens=132, plain_decode=True)),
)


@pytest.mark.long
@pytest.mark.parametrize("whole", [False, True])
def test_where_it_is_retracted_it_counts_what_was_sent_with_the_whole_fix(run: Runner, whole: bool) -> None:
    """Without overlap SGLang's penalizers count by themselves, and a request that comes back begins at 0: penalties-2."""
    _, verdict = run(RETRACTED, *(FIXED if whole else FIXED[:2]))
    assert (verdict.status, verdict.rule) == (("equal", "") if whole else ("diverged", "output.plain")), verdict
