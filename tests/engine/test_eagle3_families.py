"""EAGLE-3 heads of Qwen3 and Kimi K2: SGLang's own classes are equal, and a fault in each of their parts is named."""

import msgspec
import pytest

from eagletwin.harness.core.case import Case
from eagletwin.harness.core.patch import Edit
from eagletwin.harness.families import RECIPES

from ..rows import spread
from .conftest import Runner

# Qwen3 and Qwen3-MoE with EAGLE-3 heads: SGLang's own classes are equal, and a fault in each of their parts is named.


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
    """That a chain is, test_answers.py holds."""
    features = ("tree", "path_not_in_front", "branch_changes_parent", "branch_holes", "radix_hit")
    _, verdict = run(msgspec.structs.replace(busy_tree, model=model, exercises=features))
    assert verdict.status == "equal", verdict


# EAGLE-3 heads of latent attention: SGLang's own Kimi K2 classes are equal, and a fault in each of their parts is named.
# What target and head have in common with DeepSeek-V3 (experts, both arithmetics of a row) is in test_deepseek.py.


TARGET = "sglang.srt.models.deepseek_v2.DeepseekV2ForCausalLM.set_eagle3_layers_to_capture"
KIMI_K2_HEAD = "sglang.srt.models.kimi_k25_eagle3.Eagle3MLAModel.forward"
LAYER = "sglang.srt.models.kimi_k25_eagle3.Eagle3MLADecoderLayer.forward"
MHA = "sglang.srt.models.deepseek_common.attention_forward_methods.forward_mha.DeepseekMHAForwardMixin"
MLA = "sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla.DeepseekMLAForwardMixin"

CAPTURED = "self.model.layers_to_capture = [val + 1 for val in layer_ids]"
JOINED = "attn_input = torch.cat([embeds, hidden_states], dim=-1)"
KIMI_K2_FED_ON = "aux = hidden_states_to_logits if self.norm_output else hidden_states_to_aux"

KIMI_K2_PLANTED = {
    "the states of the layers before are captured": (
        "kimi-k2-eagle3",
        Edit(target=TARGET, match=CAPTURED, replacement="self.model.layers_to_capture = list(layer_ids)"),
        "target.hidden",
    ),
    "the states are handed on in the other order": (
        "kimi-k2-eagle3",
        Edit(
            target=KIMI_K2_HEAD,
            match="hidden_states, _ = self.fc(hidden_states)",
            replacement="hidden_states, _ = self.fc(torch.cat(hidden_states.chunk(2, -1)[::-1], -1))",
        ),
        "draft.kv",
    ),
    "state and embedding are joined in the other order": (
        "kimi-k2-eagle3",
        Edit(target=LAYER, match=JOINED, replacement="attn_input = torch.cat([hidden_states, embeds], dim=-1)"),
        "draft.kv",
    ),
    "the state is joined without its norm": (
        "kimi-k2-eagle3",
        Edit(target=LAYER, match=JOINED, replacement="attn_input = torch.cat([embeds, residual], dim=-1)"),
        "draft.kv",
    ),
    "the residual sum begins with the normed state": (
        "kimi-k2-eagle3",
        Edit(target=LAYER, match=JOINED, replacement=f"{JOINED}\nresidual = hidden_states"),
        "draft.hidden_in",
    ),
    "rows stand one position further": (
        "kimi-k2-eagle3",
        Edit(target=LAYER, match="positions=positions,", replacement="positions=positions + 1,"),
        "draft.kv",
    ),
    "the head's first chunk stores the latent row of the next position": (
        "kimi-k2-eagle3",
        Edit(
            target=f"{MHA}._set_mla_kv_buffer",
            match="latent_cache, None",
            replacement="latent_cache.roll(-1, 0) if latent_cache.shape[0] and self.hidden_size * 2 == self."
            "fused_qkv_a_proj_with_mqa.input_size else latent_cache, None",
        ),
        "draft.kv",
    ),
    "half of the head's turned key is stored": (
        "kimi-k2-eagle3",
        Edit(
            target=f"{MHA}._set_mla_kv_buffer",
            match="latent_cache[:, :, self.kv_lora_rank :] = k_pe.clone()",
            replacement="latent_cache[:, :, self.kv_lora_rank :][..., :32] = k_pe[..., :32]",
        ),
        "target.kv",
    ),
    "the head's matrix behind the sum over values is transposed": (
        "kimi-k2-eagle3",
        Edit(
            target="sglang.srt.models.kimi_k25_eagle3.Eagle3DeepseekV2ForCausalLM.post_load_weights",
            match="self_attn.w_vc = w_vc.contiguous().transpose(1, 2)",
            replacement="self_attn.w_vc = w_vc.contiguous().reshape(w_vc.shape[0], w_vc.shape[2], w_vc.shape[1])",
        ),
        "draft.hidden_in",
    ),
    "keys and values of the head are made of each other's matrix": (
        "kimi-k2-eagle3",
        Edit(
            target="sglang.srt.models.kimi_k25_eagle3.Eagle3DeepseekV2ForCausalLM.post_load_weights",
            match="self_attn.w_kc = w_kc.transpose(1, 2)",
            replacement="w_kc, w_vc = w_vc, w_kc\nself_attn.w_kc = w_kc.transpose(1, 2)",
        ),
        "draft.hidden_in",
    ),
    "the states have no norm of their own before fc": (
        "kimi-k2-eagle3.1",
        Edit(target=KIMI_K2_HEAD, match="if self.fc_norm is not None:", replacement="if False:"),
        "draft.kv",
    ),
    "each state has the norm of another": (
        "kimi-k2-eagle3.1",
        Edit(target=KIMI_K2_HEAD, match="zip(self.fc_norm, chunks)", replacement="zip(reversed(self.fc_norm), chunks)"),
        "draft.kv",
    ),
    "the state before the norm is fed on": (
        "kimi-k2-eagle3.1",
        Edit(target=KIMI_K2_HEAD, match=KIMI_K2_FED_ON, replacement="aux = hidden_states_to_aux"),
        "draft.hidden_in",
    ),
    "the state after the norm is fed on": (
        "kimi-k2-eagle3",
        Edit(target=KIMI_K2_HEAD, match=KIMI_K2_FED_ON, replacement="aux = hidden_states_to_logits"),
        "draft.hidden_in",
    ),
}


@pytest.mark.parametrize("fault", spread(sorted(KIMI_K2_PLANTED), lambda fault: KIMI_K2_PLANTED[fault][0]))
def test_a_fault_is_named_in_kimi_k2(run: Runner, busy_case: Case, fault: str) -> None:
    model, edit, rule = KIMI_K2_PLANTED[fault]
    trace, verdict = run(msgspec.structs.replace(busy_case, model=model), edit)
    assert (verdict.status, verdict.rule) == ("diverged", rule), (verdict, trace.header.ending)


@pytest.mark.long
def test_ids_that_do_not_begin_with_1_name_the_input_of_a_layer(run: Runner, busy_case: Case) -> None:
    """SGLang's alone: `[2, 3]` is to a DeepSeek what `[1, 2]` is, the outputs of layers 1 and 2. To other targets it is not."""
    edit = Edit(target=TARGET, match="if layer_ids is None:", replacement="layer_ids = [2, 3]\nif layer_ids is None:")
    _, verdict = run(msgspec.structs.replace(busy_case, model="kimi-k2-eagle3"), edit)
    assert verdict.status == "equal", verdict


@pytest.mark.parametrize("model", ["kimi-k2-eagle3", "kimi-k2-eagle3.1"])
def test_a_tree_is_equal_in_kimi_k2(run: Runner, busy_tree: Case, model: str) -> None:
    """That a chain is, test_answers.py holds."""
    features = ("tree", "path_not_in_front", "branch_changes_parent", "branch_holes", "radix_hit")
    _, verdict = run(msgspec.structs.replace(busy_tree, model=model, exercises=features))
    assert verdict.status == "equal", verdict
