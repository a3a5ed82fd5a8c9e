"""Layers that keep a state, on the real worker: what is kept after each commit, whose slot it lies in, and faults in either."""

from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.core.case import Case, EngineSettings, Request, SGLangSettings
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.run_spec import Limits
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.engines.host import Host
from eagletwin.harness.judge.judge import judge

from ..rows import spread
from .changes import Change, bump, nan, nudge, shorten
from .conftest import Runner
from .older import host_of

BACKEND = "sglang.srt.layers.attention.hybrid_linear_attn_backend.HybridLinearAttnBackend.update_mamba_state_after_mtp_verify"
SCATTER = "sglang.kernels.ops.mamba.mamba_state_scatter_triton.scatter_mamba_states_after_mtp_verify"
GDN = "sglang.srt.layers.attention.hybrid_linear_attn_backend.MambaAttnBackendBase"
POOL = "sglang.srt.mem_cache.memory_pool.HybridReqToTokenPool"
BATCH = "sglang.srt.managers.schedule_batch"

KEYS = LEDGER["hybrid-keys"]

# The source of a method is taken without the indentation of its `def`.
LAST = """        last_correct_step_indices,
        mamba_track_indices,
        mamba_steps_to_track,
        src_indices_raw=src_indices_raw,
"""
# What is wrong, where, and the rule that names it.
PLANTED = {
    "the state of the step behind the last accepted one": (
        BACKEND,
        LAST,
        LAST.replace("last_correct_step_indices", "last_correct_step_indices + 1"),
        "target.state",
    ),
    "the state of the root": (
        BACKEND,
        LAST,
        LAST.replace("last_correct_step_indices", "torch.zeros_like(last_correct_step_indices)"),
        "target.state",
    ),
    "the state of another request": (
        BACKEND,
        f"        state_indices_tensor,\n{LAST}",
        f"        state_indices_tensor.flip(0),\n{LAST}",
        "target.state",
    ),
    "the convolution's window is one row older": (
        SCATTER,
        "            last_correct_step_indices,\n            src_indices_raw,\n        )\n    if mamba_track_indices",
        "            last_correct_step_indices - 1,\n            src_indices_raw,\n        )\n    if mamba_track_indices",
        "target.conv",
    ),
    "a freed state is read: nothing clears a slot that is given again": (
        f"{BATCH}.ScheduleBatch._collect_deferred_mamba_cow_and_clear",
        "elif req.kv.mamba_needs_clear:",
        "elif False:",
        "target.state",
    ),
    # what a graph of prefill does on a GPU (docs/findings/prefill-graph)
    "the draft of a prefill reads embeddings alone": (
        "sglang.srt.models.qwen3_next_mtp.Qwen3NextForCausalLMMTP.forward",
        "forward_batch,\n                hidden_states,\n            )",
        "forward_batch,\n    (self.model.embed_tokens(input_ids)"
        " if forward_batch.forward_mode.is_extend_without_speculative() else hidden_states),\n)",
        "draft.kv",
    ),
    "a slot is freed twice": (
        f"{POOL}.free_mamba_cache",
        "self.mamba_allocator.free(mamba_index.unsqueeze(0))",
        "self.mamba_allocator.free(mamba_index.unsqueeze(0).repeat(2))",
        "state.slots",
    ),
}
# A retracted request keeps its slot, and with it the state of the last round, from which its next prefill begins.
KEPT_AT_RETRACTION = (
    Edit(
        target=f"{POOL}.free_mamba_cache",
        match="mamba_index = req.kv.mamba_pool_idx\n",
        replacement="mamba_index = req.kv.mamba_pool_idx\nif not req.finished():\n    return\n",
    ),
    Edit(
        target=f"{BATCH}.Req.reset_for_retract",
        match="    self.kv.mamba_pool_idx = None\n",
        replacement="    pass\n",
    ),
)


def test_a_chain_is_equal_and_its_states_were_compared(states_trace: Trace) -> None:
    verdict = judge(states_trace)
    assert verdict.status == "equal", verdict
    commits = sum(record.stage in ("prefill", "extend") for record in states_trace.header.records)
    assert verdict.checked["target.state"] == verdict.checked["target.conv"] == commits
    assert verdict.checked["state.slots"] > 2 * commits


def test_a_tree_is_equal(run: Runner, states_case: Case) -> None:
    features = ("tree", "path_not_in_front", "branch_changes_parent", "branch_holes", "batch", "retraction_in_decode")
    tree = replace(states_case, topk=4, num_draft_tokens=12, page_size=4, chunks=(8, 4), exercises=features)
    _, verdict = run(tree)
    assert verdict.status == "equal", verdict


@pytest.mark.parametrize("fault", spread(PLANTED, lambda fault: PLANTED[fault][-1].partition(".")[0]))
def test_a_fault_is_named(run: Runner, states_case: Case, fault: str) -> None:
    target, match, replacement, rule = PLANTED[fault]
    _, verdict = run(states_case, Edit(target=target, match=match, replacement=replacement))
    assert (verdict.status, verdict.rule) == ("diverged", rule), verdict


@pytest.mark.long
@pytest.mark.parametrize(
    ("match", "replacement", "ending"),
    [
        ("return fused_commit_track_indices(", "return 1 // 0 or fused_commit_track_indices(", "crashed"),
        ("bs * draft_token_num,", "1 // 0,", "finished"),
    ],
    ids=["the branch of CUDA", "the branch of torch"],
)
def test_of_the_commit_the_branch_behind_is_cuda_runs_and_the_other_does_not(
    run: Runner, states_case: Case, match: str, replacement: str, ending: str
) -> None:
    """docs/explanation/states.md says so."""
    commit = "sglang.srt.speculative.spec_utils._verify_commit_step_indices"
    trace, _ = run(states_case, Edit(target=commit, match=match, replacement=replacement))
    assert trace.header.ending.kind == ending, trace.header.ending
    assert f"{commit}: for tensors on a CPU too" in trace.header.engine.shims


@pytest.mark.long
def test_a_state_that_survives_a_retraction_is_named(run: Runner, states_case: Case) -> None:
    _, verdict = run(states_case, *KEPT_AT_RETRACTION)
    assert (verdict.status, verdict.rule) == ("diverged", "target.state"), verdict


CHANGES: list[tuple[str, str, Change, str]] = [
    (stage, tensor, change, rule)
    for stage in ("prefill", "extend")
    for tensor, change, rule in (
        ("target_state", nudge, "target.state"),
        ("target_state", nan, "target.state"),
        ("target_conv", nudge, "target.conv"),
        ("target_conv", nan, "target.conv"),
        ("state_slots", bump, "state.slots"),
    )
]
CHANGES += [("batch", "states", bump, "state.slots"), ("iteration", "state_held", bump, "state.slots")]
CHANGES += [("flushed", "state_free", bump, "state.slots")]


@pytest.mark.parametrize(("stage", "tensor", "change", "rule"), CHANGES)
def test_a_changed_number_is_found_and_named(states_trace: Trace, stage: str, tensor: str, change: Change, rule: str) -> None:
    records = enumerate(states_trace.header.records)
    number = next(
        n for n, one in records if one.stage == stage and states_trace.tensor(n, tensor).numel() and one.iteration > 2
    )
    wrong = Trace(
        states_trace.header, {**states_trace.tensors, f"{number}.{tensor}": change(states_trace.tensor(number, tensor))}
    )
    verdict = judge(wrong)
    assert (verdict.status, verdict.rule) == ("diverged", rule), verdict


@pytest.mark.parametrize("tensor", ["target_state", "target_conv", "state_slots"])
def test_a_state_that_was_not_recorded_is_no_pass(states_trace: Trace, tensor: str) -> None:
    number = next(n for n, record in enumerate(states_trace.header.records) if record.stage == "extend")
    wrong = Trace(
        states_trace.header, {**states_trace.tensors, f"{number}.{tensor}": shorten(states_trace.tensor(number, tensor))}
    )
    assert judge(wrong).status != "equal"


@pytest.mark.long
def test_what_is_replaced_and_what_is_not_compared_is_said(host: Host, states_case: Case, tmp_path: Path) -> None:
    """Decode, verify and commit are SGLang's own kernels in the fast runtime. Triton's interpreter runs all but these again."""
    request = replace(states_case.requests[1], max_new_tokens=2)
    case = replace(states_case, requests=(request,), events=(), exercises=())
    trace = host.engine(case, (), "shadow").run(case, tmp_path)
    verdict = judge(trace)
    assert verdict.status == "unknown", verdict  # and not diverged by kernel.shadow
    assert [line.partition(":")[0] for line in trace.header.fallbacks] == [
        "_causal_conv1d_fwd_kernel",
        "_causal_conv1d_update_kernel",
        "layer_norm_gated_fwd_kernel",
    ]
    assert all("not compared" in line for line in trace.header.fallbacks)
    replaced = [shim for shim in trace.header.engine.shims if "delta_rule.py" in shim]
    assert replaced == ["gdn_triton.chunk_gated_delta_rule (prefill alone): delta_rule.py, the recurrence in torch"]


def _tokens(seed: int, count: int) -> tuple[int, ...]:
    random = Random(seed)
    return tuple(random.randrange(96) for _ in range(count))


# States are tracked every 64 tokens. One request passes that while it is prefilled, another while it decodes, and a further one
# each goes on from there with the same token.
LONG, SHORT, ANSWER = _tokens(8, 70), _tokens(7, 58), (27, 47, 25, 91, 92, 20, 69, 55, 53, 4)
CACHED = Case(
    name="states-cached",
    model="qwen3-next-nextn",
    num_steps=3,
    page_size=4,
    chunked_prefill_size=512,
    requests=(
        Request(id="a", prompt=LONG, max_new_tokens=2),
        Request(id="b", prompt=(*LONG[:66], 1), max_new_tokens=2, arrive=5),
        Request(id="c", prompt=SHORT, max_new_tokens=14, arrive=5),
        Request(id="d", prompt=(*SHORT, *ANSWER, 7), max_new_tokens=3, arrive=24),
    ),
    engine=EngineSettings(sglang=SGLangSettings(radix_cache=True, max_total_tokens=512, max_running_requests=2)),
    exercises=("radix_hit", "batch", "accept_some"),
)


# Three prefixes of one text: the second goes on from 64 tokens, and the third from 128. The last request begins like the first.
TEXT = (*LONG, *_tokens(9, 70))
DEEPER = replace(
    CACHED,
    name="states-deeper",
    requests=(
        Request(id="a", prompt=LONG, max_new_tokens=2),
        Request(id="b", prompt=TEXT[:134], max_new_tokens=2, arrive=5),
        Request(id="c", prompt=(*TEXT[:130], 1), max_new_tokens=2, arrive=10),
        Request(id="d", prompt=TEXT[:66], max_new_tokens=2, arrive=15),
    ),
    engine=EngineSettings(sglang=SGLangSettings(radix_cache=True, max_total_tokens=1024, max_running_requests=2)),
    exercises=("radix_hit",),
)
# Answers that end before, in and behind the round that comes to 64 rows: with 62, 64, 66, 67 and 68.
ENDS = replace(
    CACHED,
    name="states-ends",
    requests=tuple(Request(id=f"r{n}", prompt=(*SHORT[:-1], n), max_new_tokens=4 + n, arrive=14 * n) for n in (0, 1, 4, 5, 6)),
    engine=EngineSettings(sglang=SGLangSettings(radix_cache=True, max_total_tokens=1024, max_running_requests=2)),
    exercises=(),
)


@pytest.mark.parametrize("topk", spread([1, 4]))
def test_prefixes_are_gone_on_from_behind_a_tracked_state(run: Runner, topk: int) -> None:
    trace, verdict = run(replace(CACHED, topk=topk, num_draft_tokens=12 if topk > 1 else 0))
    assert verdict.status == "equal", verdict
    # a prefill and a round each hand one over, and are asked for it; at the end there are as many paths as requests
    assert verdict.checked["state.tracked"] == 4 + 2 * len(CACHED.requests)
    starts = {record.request: record.numbers["start"] for record in trace.header.records if record.stage == "prefill"}
    assert starts == {"a": 0, "b": 64, "c": 0, "d": 64}


@pytest.mark.parametrize("model", spread(["qwen3-next-nextn", "nemotron-h-nextn"]))
def test_each_state_on_a_path_is_looked_at(run: Runner, model: str) -> None:
    trace, verdict = run(replace(DEEPER, model=model))
    assert verdict.status == "equal", verdict
    starts = [record.numbers["start"] for record in trace.header.records if record.stage == "prefill"]
    assert starts == [0, 64, 128, 64]
    number = next(n for n, record in enumerate(trace.header.records) if (record.stage, record.request) == ("cached", "b"))
    assert trace.integers(number, "cached_ends") == [128, 64]
    for tensor in ("cached_state", "cached_conv"):
        changed = trace.tensor(number, tensor).clone()
        changed[1].flatten()[5] += 1
        wrong = judge(Trace(trace.header, {**trace.tensors, f"{number}.{tensor}": changed}))
        assert (wrong.status, wrong.rule) == ("diverged", "state.tracked"), wrong


@pytest.mark.long
def test_what_an_answer_leaves_is_asked_for_wherever_it_ends(run: Runner) -> None:
    trace, verdict = run(ENDS)
    assert verdict.status == "equal", verdict
    ends = {record.request: record.numbers["seq_len"] for record in trace.header.records if record.stage == "extend"}
    assert list(ends.values()) == [62, 64, 66, 67, 68]
    handed = [number for number, record in enumerate(trace.header.records) if record.stage == "iteration"]
    # the first comes to no grid, and the round of the second to a row behind the end of its answer
    assert sum(len(trace.array(number, "tracked")) for number in handed) == 3


RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
COMPONENT = "sglang.srt.mem_cache.unified_cache.components.mamba.MambaComponent"
TRACKED = {
    "a prefill does not track": (
        f"{GDN}._track_mamba_state_extend",
        "if forward_metadata.track_ssm_h_src.numel() > 0:",
        "if False:",
    ),
    "a round tracks the step behind": (
        BACKEND,
        LAST,
        LAST.replace("mamba_steps_to_track", "mamba_steps_to_track + (mamba_steps_to_track >= 0).int()"),
    ),
    "a round does not track": (
        BACKEND,
        LAST,
        LAST.replace("mamba_steps_to_track", "torch.full_like(mamba_steps_to_track, -1)"),
    ),
}


@pytest.mark.parametrize("fault", spread(TRACKED))
def test_a_tracked_state_that_is_wrong_is_named(run: Runner, fault: str) -> None:
    """When the cache is handed it, and so before the next request begins from it."""
    target, match, replacement = TRACKED[fault]
    _, verdict = run(CACHED, Edit(target=target, match=match, replacement=replacement))
    assert (verdict.status, verdict.rule) == ("diverged", "state.tracked"), verdict
    assert "target.state" in verdict.later


# Right answers, and slower ones: a state never comes to the prefix cache, or is not gone on from.
LOST = {
    "that of a chunk": (
        CACHED,
        f"{COMPONENT}.prepare_for_caching_req",
        "if cache_len is None:\n            return 0\n        # Donate",
        "if True:\n            return 0\n        # Donate",
        "state.tracked",
    ),
    "that of a round, which was not seen to come to the grid": (
        ENDS,
        f"{RESULTS}._mamba_check_track_boundary",
        "if cur // interval != prev // interval:",
        "if cur // interval == prev // interval:",
        "state.tracked",
    ),
    "that of a request that ends": (
        ENDS,
        f"{RESULTS}._mamba_can_cache_finished_req",
        "return True\n\n    # no_buffer",
        "return False\n\n    # no_buffer",
        "state.tracked",
    ),
    "a hit": (
        CACHED,
        f"{BATCH}.Req.init_next_round_input",
        "tree_cache,\n            token_ids_to_match,",
        "tree_cache,\n            token_ids_to_match[:8],",
        "radix.hit",
    ),
}


@pytest.mark.parametrize("fault", spread(LOST, lambda fault: LOST[fault][4]))
def test_a_state_that_is_lost_is_named(run: Runner, fault: str) -> None:
    case, target, match, replacement, rule = LOST[fault]
    _, verdict = run(case, Edit(target=target, match=match, replacement=replacement))
    assert (verdict.status, verdict.rule) == ("diverged", rule), verdict
    assert set(verdict.later) <= {rule}


@pytest.mark.long
def test_with_overlap_as_well_where_a_result_is_looked_at_later(overlapped: Host, tmp_path: Path) -> None:
    for fault in ("", "that of a chunk", "that of a round, which was not seen to come to the grid"):
        case, target, match, replacement, rule = LOST[fault] if fault else (CACHED, "", "", "", "")
        edits = (Edit(target=target, match=match, replacement=replacement),) if fault else ()
        patches = (Patch(name="lost", edits=edits),) if fault else ()
        (folder := tmp_path / str(len(fault))).mkdir()
        verdict = judge(overlapped.engine(case, patches).run(case, folder))
        assert (verdict.status, verdict.rule) == (("diverged", rule) if fault else ("equal", "")), verdict


COPIES = f"{COMPONENT}.finalize_match_result_in_cache"
SHARED = {
    "a request goes on in the prefix cache's own slot": (
        CACHED,
        "req.kv.mamba_pool_idx = dst_index[0]",
        "req.kv.mamba_pool_idx = src_index[0]",
        "state.slots",
    ),
    "a request goes on from another point of the grid": (
        DEEPER,
        "req.kv.mamba_cow_src_index = src_index",
        "req.kv.mamba_cow_src_index = self.tree_core.all_mamba_values_flatten().sort().values[:1]",
        "target.state",
    ),
    "a state is not copied": (CACHED, "req.kv.mamba_cow_src_index = src_index", "pass", "target.state"),
}


@pytest.mark.parametrize("fault", spread(SHARED, lambda fault: SHARED[fault][3]))
def test_a_copy_of_a_cached_state_that_is_wrong_is_named(run: Runner, fault: str) -> None:
    case, match, replacement, rule = SHARED[fault]
    _, verdict = run(case, Edit(target=COPIES, match=match, replacement=replacement))
    assert (verdict.status, verdict.rule) == ("diverged", rule), verdict


# Once false alarms with pairs as keys: no token is known behind the last row of a prompt, and two prompts that part behind a
# row have its state under two keys, so that a third one finds it under one of them alone.
_GRID = LONG[:64]
PAIRED = (
    replace(CACHED, name="states-whole-prompt", requests=(Request(id="a", prompt=_GRID, max_new_tokens=2),), exercises=()),
    replace(
        CACHED,
        name="states-two-keys",
        requests=(
            Request(id="a", prompt=(*_GRID, 1, *TEXT[65:129]), max_new_tokens=2),
            Request(id="b", prompt=(*_GRID, 2, 3), max_new_tokens=2, arrive=5),
            Request(id="c", prompt=(*_GRID, 1, 4), max_new_tokens=2, arrive=10),
        ),
        engine=EngineSettings(sglang=SGLangSettings(radix_cache=True, max_total_tokens=1024, max_running_requests=2)),
        exercises=(),
    ),
)


def test_after_a_prefix_the_draft_keeps_a_row_of_another_continuation(run: Runner) -> None:
    """Live: docs/findings/hybrid-keys. Two requests share 64 tokens and differ in the next one."""
    _, verdict = run(KEYS.case)
    assert (verdict.status, verdict.rule) == ("diverged", "draft.kv"), verdict
    assert verdict.first is not None
    assert verdict.first.index.startswith("row 63, ")
    assert all(rule.startswith("draft.") for rule in verdict.later)  # the target is right


# What #27095 asked for, in the release before the first that has it.
UNCLEARED = Edit(
    target="sglang.srt.layers.attention.hybrid_linear_attn_backend.MambaAttnBackendBase._execute_deferred_mamba_cow_and_clear",
    match="not forward_batch.forward_mode.is_extend()",
    replacement="not forward_batch.forward_mode.is_extend() or forward_batch.forward_mode.is_target_verify()",
)


@pytest.mark.long
def test_the_oldest_release_that_is_driven_has_one_bug_in_chains_and_no_other(states_case: Case, tmp_path: Path) -> None:
    """Ledger entry 27095: without its fix the first round behind a batch's prefill is wrong, and with it nothing is."""
    (tmp_path / "fixed").mkdir()
    with host_of("0.5.13.post1") as oldest:
        wrong = judge(oldest.engine(states_case).run(states_case, tmp_path, Limits()))
        fix = (Patch(name="uncleared", edits=(UNCLEARED,)),)
        right = judge(oldest.engine(states_case, fix).run(states_case, tmp_path / "fixed", Limits()))
    assert (wrong.status, wrong.rule) == ("diverged", "target.kv"), wrong
    assert right.status == "equal", right


@pytest.mark.long
def test_with_pairs_as_keys_it_does_not_and_other_prefixes_are_still_found(run: Runner) -> None:
    assert KEYS.remedy is not None
    for case in (KEYS.case, CACHED, *PAIRED):
        _, verdict = run(case, *KEYS.remedy.edits)
        assert verdict.status == "equal", verdict
