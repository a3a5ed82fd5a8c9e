"""Kimi K2's target and its EAGLE-3 head of latent attention against transformers' own DeepSeek-V3, in float64."""

import pytest
import torch
from torch import nn

from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.weights import model_pair
from eagletwin.reference.chain import committed_rows
from eagletwin.reference.draft_heads import Eagle3Head
from eagletwin.reference.llama import causal, target_rows

from .deepseek import config_of, half_split, near
from .fused import fused

RECIPE = RECIPES["kimi-k2-eagle3"]


@pytest.mark.slow  # the import of transformers
def test_target_and_head_equal_transformers_deepseek_v3_in_float64() -> None:
    from transformers import DeepseekV3ForCausalLM

    shape, pair, config = RECIPE.target, model_pair(RECIPE.name), config_of(RECIPE)
    assert shape.latent is not None
    assert shape.experts is not None
    weights = pair.reference_target()
    theirs_weights = weights
    for layer in range(config.first_k_dense_replace, shape.num_layers):
        theirs_weights = fused(theirs_weights, f"model.layers.{layer}.", shape.experts.count)
    model = DeepseekV3ForCausalLM(config).double().eval()
    model.load_state_dict(theirs_weights)
    tokens = torch.randint(0, shape.vocab_size, (33,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        theirs = model.model(tokens[None], use_cache=True, output_hidden_states=True)
    ours = target_rows(weights, shape, tokens)
    handed_on = torch.cat([theirs.hidden_states[layer + 1][0] for layer in shape.aux_layers], -1)  # outputs of the layers
    assert near(ours.hidden, handed_on)
    assert near(ours.logits, model.lm_head(theirs.last_hidden_state)[0].detach())

    head = pair.reference_head(RECIPE)
    assert isinstance(head, Eagle3Head)
    mine, rows = committed_rows(head, tokens, ours.hidden), len(tokens) - 1
    keys, handed = _layer_of(head, tokens[1:], head.feed(ours.hidden[:-1]))
    assert near(mine.keys[0, :rows, 0, : shape.latent.rank], keys[0])
    assert near(half_split(mine.keys[0, :rows, 0, shape.latent.rank :]), keys[1])
    assert near(mine.hidden[:rows], handed)


def _layer_of(head: Eagle3Head, tokens: torch.Tensor, fed: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The head's layer of transformers' parts, whose attention reads [norm(embedding), norm(state)] -> what it stores of each
    row (latent vectors [R, C], turned keys [R, P]), and the residual sum [R, H]."""
    from transformers.cache_utils import DynamicCache
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as parts

    config, shape = config_of(RECIPE, dense=RECIPE.target.num_layers), RECIPE.draft
    own = {name.removeprefix("midlayer."): tensor for name, tensor in head.weights.items() if name.startswith("midlayer.")}
    config.intermediate_size = len(own["mlp.gate_proj.weight"])
    layer = parts.DeepseekV3DecoderLayer(config, 0)
    for name in ("q_a_proj", "kv_a_proj_with_mqa"):  # twice as wide: all else is DeepSeek-V3's
        setattr(layer.self_attn, name, nn.Linear(2 * shape.hidden_size, len(own[f"self_attn.{name}.weight"]), bias=False))
    layer.hidden_norm = parts.DeepseekV3RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
    layer.double().eval().load_state_dict(own)
    positions, kept = torch.arange(len(tokens)), DynamicCache(config=config)
    turned = parts.DeepseekV3RotaryEmbedding(config)(fed[None], positions[None])
    mask = torch.where(causal(len(tokens)), 0.0, -torch.inf)[None, None].double()
    with torch.no_grad():
        inner = torch.cat([layer.input_layernorm(head.embedding[tokens]), layer.hidden_norm(fed)], -1)
        attended = layer.self_attn(inner[None], turned, mask, past_key_values=kept)[0]
        x = fed + attended[0]
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return [kept.layers[0].keys[0, 0], kept.layers[0].values[0, 0]], x
