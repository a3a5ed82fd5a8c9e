"""Layers that keep a state, in Nemotron-H and Qwen3.5: SGLang's own classes are equal, and faults in their parts are named."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from eagletwin.harness.core.case import Case
from eagletwin.harness.core.errors import EagletwinError
from eagletwin.harness.core.patch import Edit
from eagletwin.harness.core.run_spec import Limits

from ..rows import spread
from .conftest import Runner
from .older import host_of
from .test_states import CACHED, PLANTED, TRACKED

# Layers that keep a state of Mamba-2, on the real worker: Nemotron-H, whose prefill runs SGLang's own kernels of chunks.


MODEL = "nemotron-h-nextn"
MIXER = "sglang.srt.layers.attention.mamba.mamba.MambaMixer2.forward"

# What the backends of both kinds share is planted once more; the rest is of this kind alone.
SHARED = ("the state of the root", "the convolution's window is one row older")
OWN = {
    "a prefill behind a chunk begins from no state": (
        MIXER,
        "if has_initial_states_p is not None and prep_initial_states:",
        "if False:",
        "target.state",
    ),
    "a prefill keeps the state of another request of its batch": (
        MIXER,
        "ssm_state[state_indices_tensor_p] = varlen_state",
        "ssm_state[state_indices_tensor_p] = varlen_state.flip(0)",
        "target.state",
    ),
    "the input itself is left out of what is read": (
        MIXER,
        "D_d = self.D[:, None, ...]",
        "D_d = 0 * self.D[:, None, ...]",
        "target.state",
    ),
}


@pytest.fixture(scope="module")
def chain(states_case: Case) -> Case:
    return replace(states_case, name="mamba-2", model=MODEL)


def test_a_chain_is_equal_and_only_its_experts_are_not_sglangs_kernels(run: Runner, chain: Case) -> None:
    trace, verdict = run(chain)
    assert verdict.status == "equal", verdict
    commits = sum(record.stage in ("prefill", "extend") for record in trace.header.records)
    assert verdict.checked["target.state"] == verdict.checked["target.conv"] == commits
    assert not trace.header.fallbacks
    assert not [shim for shim in trace.header.engine.shims if "in torch" in shim]


@pytest.mark.long
def test_a_release_with_these_kernels_elsewhere_is_not_driven(chain: Case, tmp_path: Path) -> None:
    with (
        host_of("0.5.15.post1") as old,
        pytest.raises(EagletwinError, match=r"eagletwin does not run.*layers that keep a state"),
    ):
        old.engine(chain).run(chain, tmp_path, Limits())


def test_a_tree_is_equal(run: Runner, chain: Case) -> None:
    features = ("tree", "branch_changes_parent", "branch_holes", "batch", "retraction_in_decode")
    tree = replace(chain, topk=4, num_draft_tokens=12, page_size=4, chunks=(8, 4), exercises=features)
    _, verdict = run(tree)
    assert verdict.status == "equal", verdict


@pytest.mark.parametrize("fault", spread([*OWN, *SHARED]))
def test_a_fault_is_named(run: Runner, chain: Case, fault: str) -> None:
    target, match, replacement, rule = (OWN | PLANTED)[fault]
    _, verdict = run(chain, Edit(target=target, match=match, replacement=replacement))
    assert verdict.status == "diverged", verdict
    assert rule in {verdict.rule, *verdict.later}, verdict


@pytest.mark.long
def test_prefixes_are_gone_on_from_at_the_end_of_a_chunk(run: Runner) -> None:
    trace, verdict = run(replace(CACHED, model=MODEL))
    assert verdict.status == "equal", verdict
    starts = {record.request: record.numbers["start"] for record in trace.header.records if record.stage == "prefill"}
    assert starts == {"a": 0, "b": 64, "c": 0, "d": 48}  # a chunk of its kernels has 16 rows, where Qwen3-Next's has 64


# Qwen3.5 with its MTP layer, on the real worker: another class than Qwen3-Next has, and the same states.


QWEN3_5_MODEL = "qwen3.5-nextn"
SPLIT = "sglang.kernels.ops.attention.triton_gdn_fused_proj.fused_qkvzba_split_reshape_cat_contiguous"
GATE = "sglang.kernels.ops.elementwise.elementwise.fused_sigmoid_mul"

# What the worker does for every such layer is planted once more in part; the rest is of this class alone.
SHARED_WITH_OTHERS = ("the state of the root", "the state of another request", "the convolution's window is one row older")
QWEN3_5_OWN = {
    "alpha and beta change places": (
        SPLIT,
        "v_per_group = num_heads_v // num_heads_qk",
        "v_per_group = num_heads_v // num_heads_qk\nmixed_ba = mixed_ba.roll(num_heads_v, -1)",
        "target.state",
    ),
    "every head that attends has the gate of the first": (
        GATE,
        "gate_stride_head = gate.stride(1)",
        "gate_stride_head = 0",
        "target.hidden",
    ),
}


@pytest.fixture(scope="module")
def qwen3_5_chain(states_case: Case) -> Case:
    return replace(
        states_case, name="qwen3.5", model=QWEN3_5_MODEL, exercises=("chunked_prefill", "batch", "retraction_in_decode")
    )


def test_a_chain_is_equal_and_its_prefill_alone_is_replaced(run: Runner, qwen3_5_chain: Case) -> None:
    trace, verdict = run(qwen3_5_chain)
    assert verdict.status == "equal", verdict
    commits = sum(record.stage in ("prefill", "extend") for record in trace.header.records)
    assert verdict.checked["target.state"] == verdict.checked["target.conv"] == commits
    assert not trace.header.fallbacks
    assert [shim.partition(" ")[0] for shim in trace.header.engine.shims if "in torch" in shim] == [
        "gdn_triton.chunk_gated_delta_rule"
    ]


@pytest.mark.long
def test_a_tree_is_equal_in_qwen3_5(run: Runner, qwen3_5_chain: Case) -> None:
    tree = replace(qwen3_5_chain, topk=4, num_draft_tokens=12, page_size=4, chunks=(8, 4), exercises=("tree", "batch"))
    _, verdict = run(tree)
    assert verdict.status == "equal", verdict


@pytest.mark.parametrize("fault", spread([*QWEN3_5_OWN, *SHARED_WITH_OTHERS]))
def test_a_fault_is_named_in_qwen3_5(run: Runner, qwen3_5_chain: Case, fault: str) -> None:
    target, match, replacement, rule = (QWEN3_5_OWN | PLANTED)[fault]
    _, verdict = run(qwen3_5_chain, Edit(target=target, match=match, replacement=replacement))
    assert verdict.status == "diverged", verdict
    assert rule in {verdict.rule, *verdict.later}, verdict


@pytest.mark.long
def test_prefixes_are_gone_on_from_behind_a_tracked_state(run: Runner) -> None:
    _, verdict = run(replace(CACHED, model=QWEN3_5_MODEL, exercises=("radix_hit",)))
    assert verdict.status == "equal", verdict


@pytest.mark.long
def test_a_tracked_state_that_is_wrong_is_named(run: Runner) -> None:
    target, match, replacement = TRACKED["a prefill does not track"]
    _, verdict = run(
        replace(CACHED, model=QWEN3_5_MODEL, exercises=()), Edit(target=target, match=match, replacement=replacement)
    )
    assert (verdict.status, verdict.rule) == ("diverged", "state.tracked"), verdict


@pytest.mark.long
def test_a_fault_in_its_class_is_planted_as_in_any_other(run: Runner, qwen3_5_chain: Case) -> None:
    """SGLang's module is one for machines with kernels of their own, unless it is imported as the engine does."""
    target = "sglang.srt.models.qwen3_5.Qwen3_5AttentionDecoderLayer.forward_prepare_native"
    match = "qkv, _ = self.qkv_proj(hidden_states)"
    _, verdict = run(
        qwen3_5_chain, Edit(target=target, match=match, replacement="qkv, _ = self.qkv_proj(1.01 * hidden_states)")
    )
    assert (verdict.status, verdict.rule) == ("diverged", "target.kv"), verdict
