"""How small a found case gets: for each planted bug, which requests, which chunks, which events, which step. `make quality`.

Kept apart from the other tests because each of them is a search of up to a minute.
"""

from pathlib import Path

import pytest

from eagletwin.cases.blocks import SearchConstraints
from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.check.trials import Trials
from eagletwin.harness.commands.fuzz.options import Plan
from eagletwin.harness.commands.fuzz.search import Fuzz
from eagletwin.harness.core.case import Case, Logprobs
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.run_spec import Mode, RunSpec
from eagletwin.harness.engines.host import Host
from eagletwin.harness.testing.twin import Twin

pytestmark = pytest.mark.long
GREEDY = SearchConstraints(held={"model": "llama-tiny"}, sampling="")
WORKER = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker"
SETUP = "logits_output = self.draft_runner.forward(forward_batch).logits_output"

PLANTED = {
    "the second request of a batch accepts one token too few": Edit(
        target="sglang.srt.speculative.eagle_worker_common.run_eagle_verify",
        match="    fused_commit_outputs = predict.is_cuda",
        replacement=(
            "    if bs > 1:\n        accept_lens = accept_lens.clone()\n"
            "        accept_lens[1] = max(int(accept_lens[1]) - 1, 1)\n    fused_commit_outputs = predict.is_cuda"
        ),
    ),
    "the draft's row of a last chunk of one token is lost": Edit(
        target=f"{WORKER}._draft_extend_for_prefill",
        match=SETUP,
        replacement=(
            f"{SETUP}\nif len(batch.reqs) == 1 and batch.extend_lens[0] == 1 and batch.prefix_lens[0] > 0:\n"
            "    self.draft_runner.token_to_kv_pool.v_buffer[0][forward_batch.out_cache_loc[:1]] = 1.0e4"
        ),
    ),
    "hidden states are one row off after a retraction": Edit(
        target=f"{WORKER}._draft_extend_for_prefill",
        match="hidden_states=target_hidden_states,",
        replacement=(
            "hidden_states=target_hidden_states.roll(1, 0) "
            "if any(r.retraction_count and len(r.output_ids) for r in batch.reqs) else target_hidden_states,"
        ),
    ),
    "a stop token counts only at the end of a round": Edit(
        target="sglang.srt.managers.schedule_batch.Req.update_finish_state",
        match="self._check_token_based_finish(new_accepted_tokens)",
        replacement="self._check_token_based_finish(new_accepted_tokens[-1:])",
    ),
}

# Bug -> (rule, scheduler iteration), (num_steps, page_size, chunks, requests as (prompt, max_new_tokens, arrive, number of stop
# tokens), events)
SMALLEST: dict[str, tuple[object, ...]] = {
    "the second request of a batch accepts one token too few": (
        ("verify.accept", 1),
        (1, 1, (), ((1, 2, 0, 0), (1, 2, 0, 0)), ()),
    ),
    "the draft's row of a last chunk of one token is lost": (("draft.kv", 1), (1, 1, (1,), ((2, 1, 0, 0),), ())),
    "hidden states are one row off after a retraction": (
        ("draft.hidden_in", 1),
        (1, 1, (), ((1, 2, 0, 0),), ((1, "retract"),)),
    ),
    "a stop token counts only at the end of a round": (
        ("output.tokens", 2),
        (1, 1, (), ((5, 3, 0, 12),), ()),
    ),
}


def shape(case: Case) -> tuple[object, ...]:
    requests = tuple((len(r.prompt), r.max_new_tokens, r.arrive, len(r.stop)) for r in case.requests)
    return case.num_steps, case.page_size, case.chunks, requests, tuple((event.at, event.kind) for event in case.events)


@pytest.fixture
def host(eagletwin: Twin) -> Host:
    return eagletwin.host


@pytest.mark.parametrize("bug", sorted(PLANTED))
def test_a_planted_bug_is_found_and_gets_as_small_as_this(host: Host, tmp_path: Path, bug: str) -> None:
    trials = Trials(host, RunSpec(patches=(Patch(name="planted", edits=(PLANTED[bug],)),)))
    fuzz = Fuzz(trials, tmp_path, Plan(seed=0, seconds=1e9, max_cases=1000, shrink_seconds=300.0, command="", asked=GREEDY))
    finding = next(fuzz.search())
    assert finding.outcome.verdict.status == "diverged"
    assert not finding.partial
    first = finding.outcome.verdict.first
    assert first is not None
    assert ((finding.signature.rule, first.iteration), shape(finding.outcome.case)) == SMALLEST[bug]


def test_adaptive_steps_are_dropped_where_the_bug_does_not_need_them(host: Host, tmp_path: Path) -> None:
    bug = "the second request of a batch accepts one token too few"
    trials = Trials(host, RunSpec(patches=(Patch(name="planted", edits=(PLANTED[bug],)),)))
    asked = SearchConstraints(held={"model": "llama-tiny", "adaptive": True, "topk": 1}, sampling="")
    fuzz = Fuzz(trials, tmp_path, Plan(seed=0, seconds=1e9, max_cases=200, shrink_seconds=300.0, command="", asked=asked))
    finding = next(fuzz.search())
    assert finding.found.engine.sglang.adaptive is not None
    assert finding.outcome.verdict.status == "diverged"
    assert finding.outcome.case.engine.sglang.adaptive is None


# Fault -> edit, and the smallest case: the rule, and of each request what it asks for: stream, biased tokens, logprobs,
# penalties.
ASKED = {
    "verify adds no bias": (
        Edit(
            target="sglang.srt.speculative.eagle_utils.eagle_sample",
            match="if sampling_info.logit_bias is not None:",
            replacement="if False:",
        ),
        ("verify.accept", [(False, 1, None, False)]),
    ),
    "the bonus token is an accepted draft": (
        Edit(
            target="sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor."
            "_resolve_spec_v2_tokens",
            match="req.spec_num_correct_drafts += num_correct_drafts",
            replacement="req.spec_num_correct_drafts += num_correct_drafts + 1",
        ),
        ("output.counts", [(False, 0, None, False)]),
    ),
    "a streamed request gets nothing before it has two tokens more": (
        Edit(
            target="sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator.accept",
            match="req.sampling_params.stream_interval or self.default_stream_interval",
            replacement="2",
        ),
        ("output.stream", [(True, 0, None, False)]),
    ),
    "verify leaves the scaling of penalties out": (
        Edit(
            target="sglang.srt.speculative.eagle_utils.eagle_sample",
            match="if sampling_info.acc_scaling_penalties is not None:",
            replacement="if False:",
        ),
        ("verify.accept", [(False, 0, None, True)]),
    ),
    "of the row after the token": (
        Edit(
            target="sglang.srt.layers.logprob_processor.compute_spec_logprobs",
            match="next_token_logits[flat_accept_idx]",
            replacement="next_token_logits.roll(-1, 0)[flat_accept_idx]",
        ),
        ("output.logprobs", [(False, 0, Logprobs(), False)]),
    ),
}


@pytest.mark.parametrize("fault", sorted(ASKED))
def test_what_a_fault_does_not_need_is_asked_for_no_longer(host: Host, tmp_path: Path, fault: str) -> None:
    edit, smallest = ASKED[fault]
    # live bugs of what is asked for would be found first
    mended = [remedy for name in ("input-logprob-id", "penalties") if (remedy := LEDGER[name].remedy) is not None]
    trials = Trials(host, RunSpec(patches=(Patch(name="planted", edits=(edit,)), *mended)))

    asked = SearchConstraints(held={"model": "llama-tiny"}, sampling="", asks=("stream", "logit_bias", "logprobs", "penalties"))
    plan = Plan(seed=0, seconds=1e9, max_cases=1000, shrink_seconds=300.0, command="", asked=asked)
    finding = next(Fuzz(trials, tmp_path, plan).search())
    case = finding.outcome.case
    found = [
        (request.stream, len(request.logit_bias), request.logprobs, request.penalties is not None) for request in case.requests
    ]
    assert (finding.signature.rule, found) == smallest


# Fault -> its edit, and of the smallest case: the rule, and the steps inside which requests are aborted.
IN_STEPS = {
    "a prefill that is under way is not looked for": (
        Edit(
            target="sglang.srt.managers.scheduler.Scheduler.abort_request",
            match="for req in self.collect_inflight_reqs():",
            replacement="for req in self.running_batch.reqs:",
        ),
        ("schedule.events", [1]),
    ),
    "the bonus token is an accepted draft": (ASKED["the bonus token is an accepted draft"][0], ("output.counts", [])),
}


@pytest.mark.parametrize("fault", sorted(IN_STEPS))
def test_aborts_inside_a_step_stay_only_where_a_fault_needs_them(tmp_path: Path, fault: str) -> None:
    edit, smallest = IN_STEPS[fault]
    mode = Mode(overlap=True)
    asked = SearchConstraints(held={"model": "llama-tiny"}, sampling="", asks=("abort_in_step",), overlap=True)
    plan = Plan(seed=0, seconds=1e9, max_cases=1000, shrink_seconds=120.0, command="", asked=asked)
    with Host(mode=mode) as host:
        trials = Trials(host, RunSpec(mode=mode, patches=(Patch(name="planted", edits=(edit,)),)))
        finding = next(Fuzz(trials, tmp_path, plan).search())
    steps = [event.step for event in finding.outcome.case.events if event.step]
    assert (finding.signature.rule, steps) == smallest


# Fault -> its edit, and of the smallest case: the rule, whether it has a hierarchical cache, and its requests.
ON_HOST = {
    "the draft's rows do not come back": (
        Edit(
            target="sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController._l2_load_transfers",
            match="transfers = self._l2_transfers(host_indices, device_indices, pool_transfers)",
            replacement="transfers = self._l2_transfers(host_indices, device_indices, None)",
        ),
        ("draft.kv", True),
    ),
    "the bonus token is an accepted draft": (ASKED["the bonus token is an accepted draft"][0], ("output.counts", False)),
}


@pytest.mark.parametrize("fault", sorted(ON_HOST))
def test_a_hierarchical_cache_stays_only_where_a_fault_needs_it(host: Host, tmp_path: Path, fault: str) -> None:
    edit, smallest = ON_HOST[fault]
    trials = Trials(host, RunSpec(patches=(Patch(name="planted", edits=(edit,)),)))
    held = {"model": "llama-tiny", "host_slots": 256, "topk": 1, "host_policy": "write_through"}
    plan = Plan(
        seed=0, seconds=1e9, max_cases=1000, shrink_seconds=120.0, command="", asked=SearchConstraints(held=held, sampling="")
    )
    finding = next(Fuzz(trials, tmp_path, plan).search())
    assert (finding.signature.rule, finding.outcome.case.engine.sglang.host_pages > 0) == smallest


# Fault -> its edit, and of the smallest case: the rule, and how many samples its requests want, where several.
OF_SAMPLES = {
    "a request of no new tokens is sent one": (
        Edit(
            target="sglang.srt.managers.schedule_batch.Req.update_finish_state",
            match="self.finished_len = self.sampling_params.max_new_tokens",
            replacement="self.finished_len = max(self.sampling_params.max_new_tokens, 1)",
        ),
        ("output.tokens", [2]),
    ),
    "the bonus token is an accepted draft": (ASKED["the bonus token is an accepted draft"][0], ("output.counts", [])),
}


@pytest.mark.parametrize("fault", sorted(OF_SAMPLES))
def test_samples_stay_only_where_a_fault_needs_them(host: Host, tmp_path: Path, fault: str) -> None:
    edit, smallest = OF_SAMPLES[fault]
    trials = Trials(host, RunSpec(patches=(Patch(name="planted", edits=(edit,)),)))
    asked = SearchConstraints(held={"model": "llama-tiny"}, sampling="", asks=("n",))
    plan = Plan(seed=0, seconds=1e9, max_cases=1000, shrink_seconds=120.0, command="", asked=asked)
    finding = next(Fuzz(trials, tmp_path, plan).search())
    wanted = [request.n for request in finding.outcome.case.requests if request.n > 1]
    assert (finding.signature.rule, wanted) == smallest


# Fault -> its edit, and of the smallest case: the rule, and how many of its requests are turns of a session.
IN_SESSIONS = {
    "a session that is closed gives nothing back": (
        Edit(
            target="sglang.srt.session.streaming_session.StreamingSession.release_session",
            match="self.cache.free_kv_row(slot.kv, [(protected_len, slot.kv.kv_allocated_len)])",
            replacement="pass",
        ),
        ("engine.crash", 1),
    ),
    "the bonus token is an accepted draft": (ASKED["the bonus token is an accepted draft"][0], ("output.counts", 0)),
}


@pytest.mark.parametrize("fault", sorted(IN_SESSIONS))
def test_sessions_stay_only_where_a_fault_needs_them(tmp_path: Path, fault: str) -> None:
    edit, smallest = IN_SESSIONS[fault]
    known = LEDGER["session-last-token"].remedy
    assert known is not None
    asked = SearchConstraints(held={"model": "llama-tiny"}, sampling="", asks=("session",))
    plan = Plan(seed=0, seconds=1e9, max_cases=1000, shrink_seconds=120.0, command="", asked=asked)
    with Host() as host:
        trials = Trials(host, RunSpec(patches=(known, Patch(name="planted", edits=(edit,)))))
        finding = next(Fuzz(trials, tmp_path, plan).search())
    turns = sum(bool(request.session) for request in finding.outcome.case.requests)
    assert (finding.signature.rule, turns) == smallest


# Fault -> its edit, and of the smallest case: the rule, and how many of its requests have an adapter.
WITH_ADAPTERS = {
    "the scale of an adapter is another one": (
        Edit(
            target="sglang.srt.lora.lora_manager.LoRAManager.prepare_lora_batch",
            match="= lora.scaling",
            replacement="= lora.scaling + 0.5",
        ),
        ("target.kv", 1),
    ),
    "rows of one adapter are a hit of another": (
        Edit(
            target="sglang.srt.managers.schedule_batch.Req.__init__",
            match=") + lora_id",
            replacement=") + lora_id[:0]",
        ),
        ("radix.kept", 2),
    ),
    "the bonus token is an accepted draft": (ASKED["the bonus token is an accepted draft"][0], ("output.counts", 0)),
}


@pytest.mark.parametrize("fault", sorted(WITH_ADAPTERS))
def test_adapters_stay_only_where_a_fault_needs_them(host: Host, tmp_path: Path, fault: str) -> None:
    edit, smallest = WITH_ADAPTERS[fault]
    trials = Trials(host, RunSpec(patches=(Patch(name="planted", edits=(edit,)),)))
    asked = SearchConstraints(held={"model": "llama-tiny", "radix_cache": True}, sampling="", asks=("adapter",))
    plan = Plan(seed=0, seconds=1e9, max_cases=1000, shrink_seconds=120.0, command="", asked=asked)
    finding = next(Fuzz(trials, tmp_path, plan).search())
    wanted = sum(request.adapter is not None for request in finding.outcome.case.requests)
    assert (finding.signature.rule, wanted) == smallest
