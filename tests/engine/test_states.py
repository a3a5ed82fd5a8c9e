"""Layers that keep a state, on the real worker: what is kept after each commit, whose slot it lies in, and faults in either."""

import msgspec
import pytest

from eagletwin.harness.core.case import Case, EngineSettings, Event, Request, SGLangSettings
from eagletwin.harness.core.patch import Edit
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.engines.host import Host
from eagletwin.harness.judge.judge import judge

from .changes import Change, bump, nan, nudge, shorten
from .conftest import Runner

BACKEND = "sglang.srt.layers.attention.hybrid_linear_attn_backend.HybridLinearAttnBackend.update_mamba_state_after_mtp_verify"
SCATTER = "sglang.kernels.ops.mamba.mamba_state_scatter_triton.scatter_mamba_states_after_mtp_verify"
POOL = "sglang.srt.mem_cache.memory_pool.HybridReqToTokenPool"
BATCH = "sglang.srt.managers.schedule_batch"

PROMPT = (17, 72, 8, 32, 15, 63, 57, 60, 48, 26, 12, 62, 3, 49, 55)
# A batch that grows and shrinks, chunks, a retraction: slots of states are given, taken and used again.
CHAIN = Case(
    name="states-chain",
    model="qwen3-next-nextn",
    num_steps=3,
    chunked_prefill_size=512,
    chunks=(6, 4),
    requests=(
        Request(id="a", prompt=PROMPT, max_new_tokens=14),
        Request(id="b", prompt=(5, 7), max_new_tokens=6, arrive=3),
    ),
    events=(Event(at=7, kind="retract"),),
    engine=EngineSettings(sglang=SGLangSettings(max_total_tokens=256, max_running_requests=2)),
    exercises=("chunked_prefill", "batch", "batch_shrinks", "rejection", "accept_some", "retraction_in_decode"),
)
TREE = msgspec.structs.replace(
    CHAIN,
    name="states-tree",
    topk=4,
    num_draft_tokens=12,
    page_size=4,
    chunks=(8, 4),
    exercises=("tree", "path_not_in_front", "branch_changes_parent", "branch_holes", "batch", "retraction_in_decode"),
)

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
    "kernels find another slot than the request has": (
        f"{POOL}.alloc",
        "self.req_index_to_mamba_index_mapping[rows] = mamba_index_tensor",
        "self.req_index_to_mamba_index_mapping[rows] = mamba_index_tensor % self.mamba_pool.size + 1",
        "state.slots",
    ),
    "a slot is freed twice": (
        f"{POOL}.free_mamba_cache",
        "self.mamba_allocator.free(mamba_index.unsqueeze(0))",
        "self.mamba_allocator.free(mamba_index.unsqueeze(0).repeat(2))",
        "state.slots",
    ),
    "a slot is never freed": (
        f"{POOL}.free_mamba_cache",
        "self.mamba_allocator.free(mamba_index.unsqueeze(0))",
        "pass",
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


@pytest.fixture(scope="module")
def chain(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return host.engine(CHAIN).run(CHAIN, tmp_path_factory.mktemp("chain"))


def test_a_chain_is_equal_and_its_states_were_compared(chain: Trace) -> None:
    verdict = judge(chain)
    assert verdict.status == "equal", verdict
    commits = sum(record.stage in ("prefill", "extend") for record in chain.header.records)
    assert verdict.checked["target.state"] == verdict.checked["target.conv"] == commits
    assert verdict.checked["state.slots"] > 2 * commits


def test_a_tree_is_equal(run: Runner) -> None:
    _, verdict = run(TREE)
    assert verdict.status == "equal", verdict


@pytest.mark.parametrize("fault", PLANTED)
def test_a_fault_is_named(run: Runner, fault: str) -> None:
    target, match, replacement, rule = PLANTED[fault]
    _, verdict = run(CHAIN, Edit(target=target, match=match, replacement=replacement))
    assert (verdict.status, verdict.rule) == ("diverged", rule), verdict


def test_a_state_that_survives_a_retraction_is_named(run: Runner) -> None:
    _, verdict = run(CHAIN, *KEPT_AT_RETRACTION)
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
def test_a_changed_number_is_found_and_named(chain: Trace, stage: str, tensor: str, change: Change, rule: str) -> None:
    records = enumerate(chain.header.records)
    number = next(n for n, one in records if one.stage == stage and chain.tensor(n, tensor).numel() and one.iteration > 2)
    wrong = Trace(chain.header, {**chain.tensors, f"{number}.{tensor}": change(chain.tensor(number, tensor))})
    verdict = judge(wrong)
    assert (verdict.status, verdict.rule) == ("diverged", rule), verdict


@pytest.mark.parametrize("tensor", ["target_state", "target_conv", "state_slots"])
def test_a_state_that_was_not_recorded_is_no_pass(chain: Trace, tensor: str) -> None:
    number = next(n for n, record in enumerate(chain.header.records) if record.stage == "extend")
    wrong = Trace(chain.header, {**chain.tensors, f"{number}.{tensor}": shorten(chain.tensor(number, tensor))})
    assert judge(wrong).status != "equal"
