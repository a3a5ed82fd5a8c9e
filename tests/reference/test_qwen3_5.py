"""Qwen3.5's layers and its MTP layer, against transformers' own model of text alone."""

from typing import Any

import pytest
import torch
from torch import Tensor

from eagletwin.harness.families import RECIPES, family_of
from eagletwin.harness.families.weights import model_pair
from eagletwin.reference.eagle import draft_rows
from eagletwin.reference.llama import causal

from .kept import near, rows_and_what_is_kept_equal

RECIPE = RECIPES["qwen3.5-nextn"]
# as in test_delta.py: what transformers keeps in float32 whatever the dtype leaves this share of the largest number
CLOSE = 1e-6


def _model() -> Any:
    """transformers' own Qwen3.5 with the recipe's checkpoint, which SGLang reads too."""
    import transformers

    shape, pair = RECIPE.target, model_pair(RECIPE.name)
    part, _ = family_of(RECIPE).checkpoint(RECIPE, pair.target, pair.draft)
    left_out = ("architectures", "model_type", "partial_rotary_factor", "full_attention_interval")
    config = transformers.Qwen3_5TextConfig(
        **{name: value for name, value in part.config.items() if name not in left_out},
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=RECIPE.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_norm_eps,
        layer_types=[("full_attention", "linear_attention")[shape.keeps_state(n)] for n in range(shape.num_layers)],
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    model = transformers.Qwen3_5ForCausalLM(config).double().eval()
    model.load_state_dict({name: tensor.double() for name, tensor in part.weights.items()})
    return model


@pytest.mark.slow  # the import of transformers
def test_every_row_and_what_is_kept_equal_transformers_own_model_in_float64() -> None:
    layers = range(RECIPE.target.num_layers)  # three of its chunks; [N, D, W] there
    rows_and_what_is_kept_equal(_model(), RECIPE.name, 150, CLOSE, layers, lambda state: state[0].mT)


@pytest.mark.slow
def test_the_mtp_layer_is_a_layer_of_transformers_behind_its_projection() -> None:
    """transformers has no such head. Its parts are the target's: norms, and a layer that attends."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm

    model, pair, head = _model(), model_pair(RECIPE.name), model_pair(RECIPE.name).reference_head(RECIPE)
    _, part = family_of(RECIPE).checkpoint(RECIPE, pair.target, pair.draft)
    served = {name.removeprefix("mtp."): tensor.double() for name, tensor in part.weights.items()}
    layer, own = model.model.layers[-1], "layers.0."
    layer.load_state_dict({name.removeprefix(own): tensor for name, tensor in served.items() if name.startswith(own)})

    def normed(name: str, x: Tensor) -> Tensor:
        norm = Qwen3_5RMSNorm(x.shape[-1], RECIPE.draft.rms_norm_eps).double()
        norm.load_state_dict({"weight": served[f"{name}.weight"]})
        return norm(x)

    tokens, positions = torch.arange(3, 24), torch.arange(21)
    hidden = torch.randn(21, 32, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    ours = draft_rows(head, tokens, hidden, positions, causal(21))
    with torch.no_grad():
        embedded = normed("pre_fc_norm_embedding", model.model.embed_tokens(tokens))
        x = torch.cat([embedded, normed("pre_fc_norm_hidden", hidden)], -1) @ served["fc.weight"].T
        turns = model.model.rotary_emb(x[None], positions[None, None].expand(3, 1, -1))
        mask = torch.where(causal(21), 0.0, -torch.inf).double()[None, None]
        out = layer(x[None], position_embeddings=turns, attention_mask=mask)
        theirs = normed("norm", (out[0] if isinstance(out, tuple) else out).view(21, -1))
    near(ours.hidden, theirs, CLOSE)
    near(ours.logits, theirs @ pair.target["lm_head.weight"].double().T, CLOSE)
