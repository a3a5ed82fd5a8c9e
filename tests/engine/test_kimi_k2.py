"""EAGLE-3 heads of latent attention: SGLang's own Kimi K2 classes are equal, and a fault in each of their parts is named.

What target and head have in common with DeepSeek-V3 (experts, both arithmetics of a row) is in test_deepseek.py.
"""

import msgspec
import pytest

from eagletwin.harness.core.case import Case
from eagletwin.harness.core.patch import Edit

from ..rows import spread
from .conftest import Runner

TARGET = "sglang.srt.models.deepseek_v2.DeepseekV2ForCausalLM.set_eagle3_layers_to_capture"
HEAD = "sglang.srt.models.kimi_k25_eagle3.Eagle3MLAModel.forward"
LAYER = "sglang.srt.models.kimi_k25_eagle3.Eagle3MLADecoderLayer.forward"
MHA = "sglang.srt.models.deepseek_common.attention_forward_methods.forward_mha.DeepseekMHAForwardMixin"
MLA = "sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla.DeepseekMLAForwardMixin"

CAPTURED = "self.model.layers_to_capture = [val + 1 for val in layer_ids]"
JOINED = "attn_input = torch.cat([embeds, hidden_states], dim=-1)"
FED_ON = "aux = hidden_states_to_logits if self.norm_output else hidden_states_to_aux"

PLANTED = {
    "the states of the layers before are captured": (
        "kimi-k2-eagle3",
        Edit(target=TARGET, match=CAPTURED, replacement="self.model.layers_to_capture = list(layer_ids)"),
        "target.hidden",
    ),
    "the states are handed on in the other order": (
        "kimi-k2-eagle3",
        Edit(
            target=HEAD,
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
        Edit(target=HEAD, match="if self.fc_norm is not None:", replacement="if False:"),
        "draft.kv",
    ),
    "each state has the norm of another": (
        "kimi-k2-eagle3.1",
        Edit(target=HEAD, match="zip(self.fc_norm, chunks)", replacement="zip(reversed(self.fc_norm), chunks)"),
        "draft.kv",
    ),
    "the state before the norm is fed on": (
        "kimi-k2-eagle3.1",
        Edit(target=HEAD, match=FED_ON, replacement="aux = hidden_states_to_aux"),
        "draft.hidden_in",
    ),
    "the state after the norm is fed on": (
        "kimi-k2-eagle3",
        Edit(target=HEAD, match=FED_ON, replacement="aux = hidden_states_to_logits"),
        "draft.hidden_in",
    ),
}


@pytest.mark.parametrize("fault", spread(sorted(PLANTED), lambda fault: PLANTED[fault][0]))
def test_a_fault_is_named(run: Runner, busy_case: Case, fault: str) -> None:
    model, edit, rule = PLANTED[fault]
    trace, verdict = run(msgspec.structs.replace(busy_case, model=model), edit)
    assert (verdict.status, verdict.rule) == ("diverged", rule), (verdict, trace.header.ending)


@pytest.mark.long
def test_ids_that_do_not_begin_with_1_name_the_input_of_a_layer(run: Runner, busy_case: Case) -> None:
    """SGLang's alone: `[2, 3]` is to a DeepSeek what `[1, 2]` is, the outputs of layers 1 and 2. To other targets it is not."""
    edit = Edit(target=TARGET, match="if layer_ids is None:", replacement="layer_ids = [2, 3]\nif layer_ids is None:")
    _, verdict = run(msgspec.structs.replace(busy_case, model="kimi-k2-eagle3"), edit)
    assert verdict.status == "equal", verdict


@pytest.mark.parametrize("model", ["kimi-k2-eagle3", "kimi-k2-eagle3.1"])
def test_a_tree_is_equal(run: Runner, busy_tree: Case, model: str) -> None:
    """That a chain is, test_hidden_states.py holds."""
    features = ("tree", "path_not_in_front", "branch_changes_parent", "branch_holes", "radix_hit")
    _, verdict = run(msgspec.structs.replace(busy_tree, model=model, exercises=features))
    assert verdict.status == "equal", verdict
