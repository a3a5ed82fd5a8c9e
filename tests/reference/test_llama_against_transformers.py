"""The target of the reference against an outside implementation."""

import pytest
import torch
from torch import Tensor

from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.weights import model_pair
from eagletwin.reference.llama import target_rows


@pytest.mark.slow  # the import of transformers
@pytest.mark.parametrize(
    "name", sorted(name for name in RECIPES if RECIPES[name].target.latent is None and RECIPES[name].target.clamped is None)
)  # test_mla.py and test_clamped_experts.py have the others
def test_every_row_equals_transformers_llama_in_float64(name: str) -> None:
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        MinistralConfig,
        MinistralForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    recipe, weights = RECIPES[name], model_pair(name).reference_target()
    shape = recipe.target
    # Qwen3 is a Llama with a norm of queries and keys, Ministral one with windows; Qwen3 may have them as well
    configured, made = (Qwen3Config, Qwen3ForCausalLM) if shape.qk_norm else (LlamaConfig, LlamaForCausalLM)
    windows = {}
    if shape.windows:
        configured, made = (configured, made) if shape.qk_norm else (MinistralConfig, MinistralForCausalLM)
        of_layers = [("full_attention", "sliding_attention")[window > 0] for window in shape.windows]
        windows = {"use_sliding_window": True, "sliding_window": max(shape.windows), "layer_types": of_layers}
    config = configured(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_norm_eps,
        rope_theta=shape.rope_theta,
        tie_word_embeddings=False,
        attn_implementation="eager",
        **windows,
    )
    model = made(config).double().eval()
    model.load_state_dict(weights)
    tokens = torch.randint(0, shape.vocab_size, (33,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        theirs = model.model(tokens[None], use_cache=True, output_hidden_states=True)
        logits = model.lm_head(theirs.last_hidden_state)[0]
    ours = target_rows(weights, shape, tokens)
    # transformers' hidden state n is what enters layer n
    handed = [theirs.hidden_states[layer + 1][0] for layer in shape.aux_layers] or [theirs.last_hidden_state[0]]
    if shape.pre_norm:
        before = model.model.layers[-1].register_forward_hook(lambda _module, _inputs, output: handed.__setitem__(0, output[0]))
        with torch.no_grad():
            model.model(tokens[None])
        before.remove()
    # transformers works out its rotary angles in float32 whatever the dtype: 1e-6 of the largest number is what that leaves
    for mine, other in (
        (ours.hidden, torch.cat(handed, -1)),
        (ours.logits, logits),
        *(_those_kept(ours.keys[layer], theirs.past_key_values.layers[layer].keys[0]) for layer in range(shape.num_layers)),
        *(_those_kept(ours.values[layer], theirs.past_key_values.layers[layer].values[0]) for layer in range(shape.num_layers)),
    ):
        assert (mine - other).abs().max() <= 1e-6 * other.abs().max()


def _those_kept(rows: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Of our rows [T, G, D] those that transformers keeps [G, n, D]: of a layer with a window, the last ones."""
    return rows[len(rows) - kept.shape[1] :].transpose(0, 1), kept
