"""Qwen3.5 with its MTP layer, on the real worker: another class than Qwen3-Next has, and the same states."""

import pytest
from msgspec.structs import replace

from eagletwin.harness.core.case import Case
from eagletwin.harness.core.patch import Edit

from ..rows import spread
from .conftest import Runner
from .test_states import CACHED, PLANTED, TRACKED

MODEL = "qwen3.5-nextn"
SPLIT = "sglang.kernels.ops.attention.triton_gdn_fused_proj.fused_qkvzba_split_reshape_cat_contiguous"
GATE = "sglang.kernels.ops.elementwise.elementwise.fused_sigmoid_mul"

# What the worker does for every such layer is planted once more in part; the rest is of this class alone.
SHARED_WITH_OTHERS = ("the state of the root", "the state of another request", "the convolution's window is one row older")
OWN = {
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
def chain(states_case: Case) -> Case:
    return replace(states_case, name="qwen3.5", model=MODEL, exercises=("chunked_prefill", "batch", "retraction_in_decode"))


def test_a_chain_is_equal_and_its_prefill_alone_is_replaced(run: Runner, chain: Case) -> None:
    trace, verdict = run(chain)
    assert verdict.status == "equal", verdict
    commits = sum(record.stage in ("prefill", "extend") for record in trace.header.records)
    assert verdict.checked["target.state"] == verdict.checked["target.conv"] == commits
    assert not trace.header.fallbacks
    assert [shim.partition(" ")[0] for shim in trace.header.engine.shims if "in torch" in shim] == [
        "gdn_triton.chunk_gated_delta_rule"
    ]


def test_a_tree_is_equal(run: Runner, chain: Case) -> None:
    tree = replace(chain, topk=4, num_draft_tokens=12, page_size=4, chunks=(8, 4), exercises=("tree", "batch"))
    _, verdict = run(tree)
    assert verdict.status == "equal", verdict


@pytest.mark.parametrize("fault", spread([*OWN, *SHARED_WITH_OTHERS]))
def test_a_fault_is_named(run: Runner, chain: Case, fault: str) -> None:
    target, match, replacement, rule = (OWN | PLANTED)[fault]
    _, verdict = run(chain, Edit(target=target, match=match, replacement=replacement))
    assert verdict.status == "diverged", verdict
    assert rule in {verdict.rule, *verdict.later}, verdict


def test_prefixes_are_gone_on_from_behind_a_tracked_state(run: Runner) -> None:
    _, verdict = run(replace(CACHED, model=MODEL, exercises=("radix_hit",)))
    assert verdict.status == "equal", verdict


@pytest.mark.long
def test_a_tracked_state_that_is_wrong_is_named(run: Runner) -> None:
    target, match, replacement = TRACKED["a prefill does not track"]
    _, verdict = run(replace(CACHED, model=MODEL, exercises=()), Edit(target=target, match=match, replacement=replacement))
    assert (verdict.status, verdict.rule) == ("diverged", "state.tracked"), verdict


@pytest.mark.long
def test_a_fault_in_its_class_is_planted_as_in_any_other(run: Runner, chain: Case) -> None:
    """SGLang's module is one for machines with kernels of their own, unless it is imported as the engine does."""
    target = "sglang.srt.models.qwen3_5.Qwen3_5AttentionDecoderLayer.forward_prepare_native"
    match = "qkv, _ = self.qkv_proj(hidden_states)"
    _, verdict = run(chain, Edit(target=target, match=match, replacement="qkv, _ = self.qkv_proj(1.01 * hidden_states)"))
    assert (verdict.status, verdict.rule) == ("diverged", "target.kv"), verdict
