"""Mixed chunks: a prefill batch gives each request that runs one token, without drafts, on the real scheduler."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from eagletwin.cases.regressions import LEDGER
from eagletwin.harness.core.answers import Finish
from eagletwin.harness.core.case import Case, EngineSettings, Grammar, GrammarBackend, Request, SGLangSettings
from eagletwin.harness.core.patch import Edit
from eagletwin.harness.engines.host import Host
from eagletwin.harness.judge.judge import judge

from .conftest import Runner

LONG = (5, 9, 33, 8, 1, 2, 7, 55, 61, 12)
CASE = Case(
    name="mixed-chunks",
    model="llama-tiny",
    num_steps=2,
    chunked_prefill_size=4,
    requests=(
        Request(id="a", prompt=LONG[:3], max_new_tokens=14),
        Request(id="b", prompt=LONG, max_new_tokens=6, arrive=2),
        Request(id="c", prompt=LONG[2:], max_new_tokens=5, arrive=6),
    ),
    exercises=("mixed_step", "chunked_prefill", "accept_all", "batch_grows", "batch_shrinks"),
    engine=EngineSettings(sglang=SGLangSettings(mixed_chunks=True)),
)
MIX = "sglang.srt.managers.schedule_batch.ScheduleBatch.mix_with_running"
RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"

# Fault -> its edit, and the rule that names it first.
PLANTED: dict[str, tuple[Edit, str]] = {
    "the row of a running request goes into the slot before its own": (
        Edit(
            target=MIX,
            match="[r.seqlen - 1 for r in running_batch.reqs],",
            replacement="[r.seqlen - 2 for r in running_batch.reqs],",
        ),
        "draft.slots",
    ),
    "a running request's row has the position before its own": (
        Edit(
            target=MIX,
            match="running_prefix_lens = [r.seqlen - 1 for r in running_batch.reqs]",
            replacement="running_prefix_lens = [r.seqlen - 2 for r in running_batch.reqs]",
        ),
        "target.inputs",
    ),
    "the row is not counted as committed": (
        Edit(
            target=f"{RESULTS}.process_batch_result_prefill",
            match="req.kv.kv_committed_len += 1",
            replacement="pass",
        ),
        "draft.slots",
    ),
    "the token before the last one is consumed": (
        Edit(
            target="sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker._draft_extend_for_prefill",
            match="tail_tokens[i]",
            replacement="tail_tokens[0]",
        ),
        "draft.input_ids",
    ),
}


def test_a_mixed_step_is_right(run: Runner) -> None:
    _, verdict = run(CASE)
    assert verdict.status == "equal", verdict


def test_and_of_an_eagle3_head(run: Runner) -> None:
    _, verdict = run(replace(CASE, model="llama-eagle3", exercises=("mixed_step",)))
    assert verdict.status == "equal", verdict


@pytest.mark.parametrize("fault", sorted(PLANTED))
def test_a_fault_is_named(run: Runner, fault: str) -> None:
    edit, rule = PLANTED[fault]
    trace, verdict = run(replace(CASE, exercises=()), edit)
    assert (verdict.status, verdict.rule) == ("diverged", rule), (verdict, trace.header.ending)


OF_B = ("b", "finished")
# Backend -> how the red side ends: a request that is given a token outside its grammar is aborted, or nobody is answered.
OUTSIDE: dict[GrammarBackend, str] = {"xgrammar": "finished", "llguidance": "crashed"}


@pytest.mark.parametrize("arrive", [1, 2], ids=["behind a prefill", "behind a round"])
@pytest.mark.parametrize("backend", sorted(OUTSIDE))
def test_with_overlap_a_running_request_is_masked_by_the_step_before_and_by_all_its_text_with_the_candidate_fix(
    overlapped: Host, tmp_path: Path, backend: GrammarBackend, arrive: int
) -> None:
    entry = LEDGER["mixed-grammar"]
    assert entry.remedy is not None
    new, running = entry.case.requests
    running = replace(running, max_new_tokens=6, grammar=Grammar(rules=("abc",)))
    own = SGLangSettings(mixed_chunks=True, grammar_backend=backend)
    case = replace(entry.case, requests=(replace(new, arrive=arrive), running), engine=EngineSettings(sglang=own))
    for name, patches in (("red", ()), ("green", (entry.remedy,))):
        (tmp_path / name).mkdir()
        trace = overlapped.engine(case, patches).run(case, tmp_path / name)
        verdict = judge(trace)
        if patches:
            assert verdict.status == "equal", verdict
            assert trace.header.ending.kind == "finished"
        else:
            assert (verdict.status, verdict.rule) == ("diverged", "grammar.mask"), verdict
            assert trace.header.ending.kind == OUTSIDE[backend], trace.header.ending
            found = [record.numbers["finish"] for record in trace.header.records if (record.request, record.stage) == OF_B]
            assert found == ([Finish.ABORT] if OUTSIDE[backend] == "finished" else [])
