"""Adaptive numbers of draft steps on the real scheduler and worker: rounds of several lengths, and who chooses them."""

import json
import tempfile
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from eagletwin.harness.core.case import Adaptive, Case, EngineSettings, Request, SGLangSettings, Tier
from eagletwin.harness.core.errors import EagletwinError
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.records import NODES_OF, STEPS_OF
from eagletwin.harness.core.run_spec import Limits
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.engines.sglang.compat import adaptive
from eagletwin.harness.judge.judge import judge
from eagletwin.harness.page.timeline import _round

from ..rows import spread
from .conftest import Runner
from .older import host_of
from .test_states import UNCLEARED

# One request alone goes up, down and to no drafts; with a second one there are fewer steps for both.
CASE = Case(
    name="adaptive",
    model="llama-tiny",
    num_steps=2,
    chunked_prefill_size=8,
    requests=(
        Request(id="a", prompt=(12, 71, 61), max_new_tokens=16),
        Request(id="b", prompt=(60, 43, 43, 15), max_new_tokens=9, arrive=3),
    ),
    engine=EngineSettings(
        sglang=SGLangSettings(
            adaptive=Adaptive(
                tiers=(Tier(batch=1, steps=(0, 1, 2, 4)), Tier(batch=2, steps=(1, 2))), alpha=0.9, interval=1, warmup=0
            )
        )
    ),
    exercises=("more_steps", "fewer_steps", "no_steps", "steps_again", "batch_grows", "batch_shrinks", "rejection"),
)
WORKER = "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2"
RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"

# Fault -> its edit, and the rule that names it first.
PLANTED: dict[str, tuple[Edit, str]] = {
    "the target keeps the attention backend of the number before": (
        Edit(
            target=f"{WORKER}.apply_runtime_state",
            match="self._target_worker.model_runner.attn_backend = state.target_attn_backend",
            replacement="pass",
        ),
        "steps.parts",
    ),
    "draft extend keeps it": (
        Edit(
            target=f"{WORKER}.apply_runtime_state",
            match="dw.draft_runner.attn_backend = state.draft_extend_attn_backend",
            replacement="pass",
        ),
        "steps.parts",
    ),
    "the running configuration keeps the number of steps": (
        Edit(
            target=f"{WORKER}.apply_runtime_state",
            match="speculative_num_steps=state.speculative_num_steps,",
            replacement="",
        ),
        "steps.parts",
    ),
    "the links of a chain keep their length": (
        Edit(
            target=f"{WORKER}.apply_runtime_state",
            match="dw._rebuild_topk1_chain_buffers()",
            replacement="pass",
        ),
        "kernel.memory",
    ),
    "the size of the batch is not looked at": (
        Edit(
            target=f"{WORKER}.forward_batch_generation",
            match="self.activate_step_by_batch(batch.seq_lens.shape[0])",
            replacement="pass",
        ),
        "steps.chosen",
    ),
    "the bonus token counts as an accepted draft": (
        Edit(
            target=f"{WORKER}.on_verify_complete_cpu",
            match="num_correct_drafts_per_req, batch_size=batch_size",
            replacement="[drafts + 1 for drafts in num_correct_drafts_per_req], batch_size=batch_size",
        ),
        "steps.chosen",
    ),
    "the first request of a batch speaks for all": (
        Edit(
            target=f"{RESULTS}._resolve_spec_v2_tokens",
            match="result.num_correct_drafts_per_req_cpu, batch_size=len(batch.reqs)",
            replacement="result.num_correct_drafts_per_req_cpu[:1], batch_size=len(batch.reqs)",
        ),
        "steps.fed",
    ),
    "draft extend is left out after a round without drafts": (
        Edit(
            target=f"{WORKER}.forward_batch_generation",
            match="envs.SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND.get()",
            replacement="True",
        ),
        "draft.kv",
    ),
}

# A batch of two has a round of 4 steps behind rounds without drafts.
JUMP = EngineSettings(
    sglang=SGLangSettings(
        adaptive=Adaptive(tiers=(Tier(batch=1, steps=(0,)), Tier(batch=2, steps=(4,)), Tier(batch=64, steps=(1, 2))))
    )
)


@pytest.mark.long
def test_slots_that_are_reserved_for_the_steps_of_the_round_before_are_too_few(run: Runner) -> None:
    edit = Edit(
        target="sglang.srt.mem_cache.allocation_sizing.get_alloc_len_per_decode",
        match="spec_tokens = max_speculative_num_draft_tokens()",
        replacement="spec_tokens = spec.speculative_num_draft_tokens",
    )
    _, verdict = run(replace(CASE, engine=JUMP, exercises=("more_steps", "fewer_steps", "no_steps")))
    assert verdict.status == "equal", verdict
    trace, verdict = run(replace(CASE, engine=JUMP, exercises=()), edit)
    assert (verdict.status, verdict.rule) == ("diverged", "draft.slots"), (verdict, trace.header.ending)


def test_rounds_of_several_lengths_are_right(run: Runner) -> None:
    trace, verdict = run(CASE)
    assert verdict.status == "equal", verdict
    assert {record.numbers["steps"] for record in trace.header.records if record.stage == "verify"} == {0, 1, 2, 4}
    assert verdict.checked["steps.chosen"] == sum(record.stage == "steps" for record in trace.header.records)


def test_a_trace_that_lacks_what_was_recorded_of_the_choice_is_unknown(run: Runner) -> None:
    trace, _ = run(CASE)
    for lost in (("steps", "fed"), ("steps",)):
        records = tuple(record for record in trace.header.records if record.stage not in lost)
        kept = [number for number, record in enumerate(trace.header.records) if record.stage not in lost]
        tensors = {f"{at}.{name}": trace.tensor(number, name) for at, number in enumerate(kept) for name in records[at].tensors}
        verdict = judge(Trace(replace(trace.header, records=records), tensors))
        assert verdict.status == "unknown", lost
        assert "was not recorded in iteration" in verdict.reason


def test_in_graphs_the_choice_goes_by_the_size_that_a_batch_is_padded_to(run: Runner) -> None:
    trace, _ = run(CASE)
    for graphs, verdict in (((1, 2), "equal"), ((2,), "diverged"), ((1, 4), "equal"), ((4,), "diverged")):
        engine = replace(trace.header.engine, graphs=graphs)
        padded = judge(Trace(replace(trace.header, engine=engine), trace.tensors))
        assert padded.status == verdict, (graphs, padded)
        assert verdict == "equal" or padded.rule == "steps.chosen", graphs


def test_every_part_of_the_worker_says_its_number_in_some_round(run: Runner) -> None:
    """A part that a release calls otherwise would be -1 in all of them, and no rule would look at it."""
    trace, _ = run(CASE)
    said = [number for number, record in enumerate(trace.header.records) if record.stage == "steps"]
    for name, parts in (("steps", STEPS_OF), ("nodes", NODES_OF)):
        best = [max(column) for column in zip(*(trace.integers(number, name) for number in said), strict=True)]
        assert min(best) > 0, dict(zip(parts, best, strict=True))


def test_a_page_counts_the_drafts_of_each_round(run: Runner) -> None:
    trace, _ = run(CASE)
    verified = [number for number, record in enumerate(trace.header.records) if record.stage == "verify"]
    marks = {_round(trace, number, trace.header.records[number], {}, brief=True).text for number in verified}
    assert {int(mark.split(" of ")[1]) for mark in marks} > {0, 1}
    assert all(int(accepted) <= int(of) for accepted, of in (mark.split(" of ") for mark in marks))


def test_a_configuration_may_have_more_choices_than_any_of_its_tiers() -> None:
    tiers = (Tier(batch=1, steps=(0, 1, 2, 3, 4)), Tier(batch=2, steps=(5, 6, 7, 8, 9)))
    case = replace(CASE, num_steps=3, engine=EngineSettings(sglang=SGLangSettings(adaptive=Adaptive(tiers=tiers))))
    again = msgspec.json.decode(msgspec.json.encode(case.configuration()), type=Case)
    assert again.engine.sglang.adaptive is not None
    assert again.engine.sglang.adaptive.choices == set(range(10))


@pytest.mark.parametrize("fault", spread(sorted(PLANTED), lambda fault: PLANTED[fault][-1]))
def test_a_fault_is_named(run: Runner, fault: str) -> None:
    edit, rule = PLANTED[fault]
    trace, verdict = run(replace(CASE, exercises=()), edit)
    assert (verdict.status, verdict.rule) == ("diverged", rule), (verdict, trace.header.ending)


@pytest.mark.long
def test_the_first_release_that_has_them_is_right_and_refuses_rounds_without_drafts(tmp_path: Path) -> None:
    """With states, too, but for ledger entry 27095, which is mended here."""
    assert CASE.engine.sglang.adaptive is not None
    drafting = replace(CASE.engine.sglang.adaptive, tiers=(Tier(batch=1, steps=(1, 2, 4)), Tier(batch=2, steps=(1, 2))))
    settings = EngineSettings(sglang=SGLangSettings(adaptive=drafting))
    plain = replace(CASE, engine=settings, exercises=("more_steps", "fewer_steps"))
    kept = replace(plain, model="qwen3-next-nextn")
    mended = (Patch(name="uncleared", edits=(UNCLEARED,)),)
    with host_of("0.5.13") as first:
        for case, patches in ((plain, ()), (kept, mended)):
            folder = tmp_path / case.model
            folder.mkdir()
            verdict = judge(first.engine(case, patches).run(case, folder, Limits()))
            assert verdict.status == "equal", verdict
        with pytest.raises(EagletwinError, match="adaptive steps with 0 among them"):
            first.engine(CASE).run(CASE, tmp_path, Limits())


def test_the_file_of_the_settings_is_another_for_others_and_is_not_written_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank writes it before each case, and reads it at once."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    settings = Adaptive(tiers=(Tier(batch=1, steps=(1, 2)),))
    named = adaptive.arguments(settings)["speculative_adaptive_config"]
    first = Path(named).stat()
    assert adaptive.arguments(replace(settings, tiers=(Tier(batch=1, steps=(1, 3)),)))["speculative_adaptive_config"] != named
    assert adaptive.arguments(settings)["speculative_adaptive_config"] == named
    assert (Path(named).stat().st_ino, Path(named).stat().st_mtime_ns) == (first.st_ino, first.st_mtime_ns)
    assert json.loads(Path(named).read_bytes())["1"] == {"candidate_steps": [1, 2]}
    assert len([*tmp_path.iterdir()]) == 2
