"""Mixed chunks: a prefill batch gives each request that runs one token, without drafts, on the real scheduler."""

import pytest
from msgspec.structs import replace

from eagletwin.harness.core.case import Case, EngineSettings, Request, SGLangSettings
from eagletwin.harness.core.patch import Edit

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
