"""Qwen3 and Qwen3-MoE with EAGLE-3 heads: SGLang's own classes are equal, and a fault in each of their parts is named."""

import msgspec
import pytest

from eagletwin.harness.core.case import Case
from eagletwin.harness.core.patch import Edit
from eagletwin.harness.families import RECIPES

from ..rows import spread
from .conftest import Runner

MOE = "sglang.srt.models.qwen3_moe"
DENSE = "sglang.srt.models.qwen3"
ROUTER = "sglang.srt.layers.moe.topk.fused_topk_torch_native"
EXPERTS = "sglang.srt.layers.moe.fused_moe_native.moe_forward_native"
HEAD = "sglang.srt.models.llama_eagle3.LlamaModel.forward"
HEAD_LAYER = "sglang.srt.models.llama_eagle3.LlamaDecoderLayer.forward"

CHOSEN = "topk_weights, topk_ids = torch.topk(topk_weights, topk, dim=-1)"
NORMED = "q, k = apply_qk_norm("
FED_ON = "aux = hidden_states_to_logits if self.norm_output else hidden_states_to_aux"

# What is wrong -> the model, the fault, and the rule that names it. Every layer of the target has experts: what one of them
# gets wrong is in the rows that the next one stores.
PLANTED = {
    "experts are swapped behind the router": (
        "qwen3-moe-eagle3",
        Edit(target=ROUTER, match=CHOSEN, replacement=f"{CHOSEN}\ntopk_ids = topk_ids.flip(-1)"),
        "target.kv",
    ),
    "one matrix of an expert is another's": (
        "qwen3-moe-eagle3",
        Edit(target=EXPERTS, match="= layer.w13_weight[i]", replacement="= layer.w13_weight[i ^ 1]"),
        "target.kv",
    ),
    "weights of the chosen experts do not sum to one": (
        "qwen3-moe-eagle3",
        Edit(target=ROUTER, match="if renormalize:", replacement="if False:"),
        "target.kv",
    ),
    "a layer is routed by the layer before it": (
        "qwen3-moe-eagle3",
        Edit(
            target=f"{MOE}.Qwen3MoeSparseMoeBlock.forward_normal",
            match="router_logits, _ = self.gate(hidden_states)",
            replacement="kept = type(self).__dict__.get('kept', self.gate)\n"
            "router_logits, _ = (kept if self.layer_id == 1 else self.gate)(hidden_states)\n"
            "type(self).kept = self.gate",
        ),
        "target.kv",
    ),
    "the worse of two experts is left out": (
        "qwen3-moe-eagle3",
        Edit(target=ROUTER, match=CHOSEN, replacement=f"{CHOSEN}\ntopk_weights[:, 1:] = 0"),
        "target.kv",
    ),
    "experts: the states of the layers before are captured": (
        "qwen3-moe-eagle3",
        Edit(
            target=f"{MOE}.Qwen3MoeForCausalLM.set_eagle3_layers_to_capture",
            match="[val + 1 for val in layer_ids]",
            replacement="layer_ids",
        ),
        "target.hidden",
    ),
    "experts: keys have no norm": (
        "qwen3-moe-eagle3",
        Edit(
            target=f"{MOE}.Qwen3MoeAttention.apply_qk_norm_rope",
            match=NORMED,
            replacement="q, k = (lambda q, k, **others: (apply_qk_norm(q=q, k=k, **others)[0], k))(",
        ),
        "target.kv",
    ),
    "keys have no norm": (
        "qwen3-eagle3",
        Edit(
            target=f"{DENSE}.Qwen3Attention.forward_prepare_native",
            match=NORMED,
            replacement="q, k = (lambda q, k, **others: (apply_qk_norm(q=q, k=k, **others)[0], k))(",
        ),
        "target.kv",
    ),
    "queries have no norm": (
        "qwen3-eagle3",
        Edit(
            target=f"{DENSE}.Qwen3Attention.forward_prepare_native",
            match=NORMED,
            replacement="q, k = (lambda q, k, **others: (q, apply_qk_norm(q=q, k=k, **others)[1]))(",
        ),
        "target.kv",
    ),
    "the states of the layers before are captured": (
        "qwen3-eagle3",
        Edit(
            target=f"{DENSE}.Qwen3ForCausalLM.set_eagle3_layers_to_capture",
            match="[val + 1 for val in layer_ids]",
            replacement="layer_ids",
        ),
        "target.hidden",
    ),
    "the states have no norm of their own before fc": (
        "qwen3-eagle3.1",
        Edit(target=HEAD, match="if self.fc_norm is not None:", replacement="if False:"),
        "draft.kv",
    ),
    "each state has the norm of another": (
        "qwen3-eagle3.1",
        Edit(target=HEAD, match="zip(self.fc_norm, chunks)", replacement="zip(reversed(self.fc_norm), chunks)"),
        "draft.kv",
    ),
    "the state before the norm is fed on": (
        "qwen3-eagle3.1",
        Edit(target=HEAD, match=FED_ON, replacement="aux = hidden_states_to_aux"),
        "draft.hidden_in",
    ),
    "the state before the norm is fed on between steps alone": (
        "qwen3-eagle3.1",
        Edit(
            target=HEAD,
            match=FED_ON,
            replacement="aux = hidden_states_to_aux if forward_batch.forward_mode.is_decode() else hidden_states_to_logits",
        ),
        "draft.proposal",
    ),
    "the state before the norm is fed on by an extend alone": (
        "qwen3-eagle3.1",
        Edit(
            target=HEAD,
            match=FED_ON,
            replacement="aux = hidden_states_to_logits if forward_batch.forward_mode.is_decode() else hidden_states_to_aux",
        ),
        "draft.hidden_in",
    ),
    "the states side by side have no norm before fc": (
        "qwen3-eagle3-norm",
        Edit(target=HEAD, match="if self.input_norm is not None:", replacement="if False:"),
        "draft.kv",
    ),
    "the norm before fc is of each state by itself": (
        "qwen3-eagle3-norm",
        Edit(
            target=HEAD,
            match="hidden_states = self.input_norm(hidden_states)",
            replacement="each = hidden_states.unflatten(-1, (3, -1))\n"
            "each = each * torch.rsqrt(each.square().mean(-1, keepdim=True) + 1e-6)\n"
            "hidden_states = each.flatten(-2) * self.input_norm.weight",
        ),
        "draft.kv",
    ),
    "the state after the norm is fed on": (
        "qwen3-eagle3-norm",
        Edit(target=HEAD, match=FED_ON, replacement="aux = hidden_states_to_logits"),
        "draft.hidden_in",
    ),
    "the second layer has no norm before attention": (
        "qwen3-eagle3-deep",
        Edit(
            target=HEAD_LAYER,
            match="hidden_states, residual = self.hidden_norm(hidden_states, residual)",
            replacement="hidden_states = residual = hidden_states + residual",
        ),
        "draft.kv",
    ),
    "the second layer has the norm that the first has for the token": (
        "qwen3-eagle3-deep",
        Edit(
            target=HEAD_LAYER,
            match="hidden_states, residual = self.hidden_norm(hidden_states, residual)",
            replacement="hidden_states, residual = self.input_layernorm(hidden_states, residual)",
        ),
        "draft.kv",
    ),
    "both layers store their rows in one": (
        "qwen3-eagle3-deep",
        Edit(
            target=HEAD,
            match="for layer in self.layers:",
            replacement="for layer in (setattr(layer.self_attn.attn, 'layer_id', 0) or layer for layer in self.layers):",
        ),
        "draft.kv",
    ),
    "the second layer stands one position further": (
        "qwen3-eagle3-deep",
        Edit(
            target=HEAD_LAYER,
            match="positions=positions,",
            replacement="positions=positions if self.is_input_layer else positions + 1,",
        ),
        "draft.kv",
    ),
    "the second layer is left out": (
        "qwen3-eagle3-deep",
        Edit(target=HEAD, match="for layer in self.layers:", replacement="for layer in self.layers[:1]:"),
        "draft.kv",
    ),
}

MODELS = sorted(name for name, recipe in RECIPES.items() if recipe.family in ("qwen3", "qwen3_moe"))


@pytest.mark.parametrize("fault", spread(sorted(PLANTED), lambda fault: PLANTED[fault][0]))
def test_a_fault_is_named(run: Runner, busy_case: Case, fault: str) -> None:
    model, edit, rule = PLANTED[fault]
    trace, verdict = run(msgspec.structs.replace(busy_case, model=model), edit)
    assert (verdict.status, verdict.rule) == ("diverged", rule), (verdict, trace.header.ending)


@pytest.mark.parametrize("model", MODELS)
def test_a_tree_is_equal(run: Runner, busy_tree: Case, model: str) -> None:
    """That a chain is, test_hidden_states.py holds."""
    features = ("tree", "path_not_in_front", "branch_changes_parent", "branch_holes", "radix_hit")
    _, verdict = run(msgspec.structs.replace(busy_tree, model=model, exercises=features))
    assert verdict.status == "equal", verdict
