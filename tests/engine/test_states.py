"""Layers that keep a state, on the real worker: what is kept after each commit, whose slot it lies in, and faults in either."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from eagletwin.harness.core.case import Case
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.patch import Edit
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.engines.host import Host
from eagletwin.harness.families.valid import check_case
from eagletwin.harness.judge.judge import judge

from .changes import Change, bump, nan, nudge, shorten
from .conftest import Runner

BACKEND = "sglang.srt.layers.attention.hybrid_linear_attn_backend.HybridLinearAttnBackend.update_mamba_state_after_mtp_verify"
SCATTER = "sglang.kernels.ops.mamba.mamba_state_scatter_triton.scatter_mamba_states_after_mtp_verify"
POOL = "sglang.srt.mem_cache.memory_pool.HybridReqToTokenPool"
BATCH = "sglang.srt.managers.schedule_batch"

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


@pytest.mark.parametrize("fault", PLANTED)
def test_a_fault_is_named(run: Runner, states_case: Case, fault: str) -> None:
    target, match, replacement, rule = PLANTED[fault]
    _, verdict = run(states_case, Edit(target=target, match=match, replacement=replacement))
    assert (verdict.status, verdict.rule) == ("diverged", rule), verdict


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


def test_a_prefix_cache_is_refused_before_anything_runs(states_case: Case) -> None:
    settings = replace(states_case.engine.sglang, radix_cache=True)
    with pytest.raises(InputError, match="what a cached prefix keeps"):
        check_case(replace(states_case, engine=replace(states_case.engine, sglang=settings)), "here")
