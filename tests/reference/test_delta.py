"""Layers that keep a state, gated attention and the MTP layer: against transformers' own Qwen3-Next, and by hand."""

from typing import Any

import pytest
import torch
from torch import Tensor

from eagletwin.harness.families import RECIPES, family_of
from eagletwin.harness.families.weights import model_pair
from eagletwin.reference.eagle import draft_rows
from eagletwin.reference.llama import causal
from eagletwin.reference.sizes import DeltaShape
from eagletwin.reference.state_layers import delta_layer, delta_step, unit

from .fused import fused
from .kept import drawn_from, near, rows_and_what_is_kept_equal, sequences_are_their_own

RECIPE = RECIPES["qwen3-next-nextn"]
# transformers works out rotary angles, the recurrence and the router's softmax in float32 whatever the dtype: 1e-6 of the
# largest number is what that leaves
CLOSE = 1e-6


def test_a_step_takes_out_what_lies_under_the_key_and_puts_the_value_there() -> None:
    """One head of width 2: nothing decays, beta is 1, and a key of length 1 finds its own value again."""
    one, first, second = torch.ones(1).double(), torch.tensor([[1.0, 0.0]]).double(), torch.tensor([[0.6, 0.8]]).double()
    state = delta_step(torch.zeros(1, 2, 2).double(), one, one, first, torch.tensor([[3.0, 5.0]]).double())
    assert torch.allclose(state @ first[0], torch.tensor([[3.0, 5.0]]).double())
    state = delta_step(state, one, one, second, torch.tensor([[7.0, 9.0]]).double())
    assert torch.allclose(state @ second[0], torch.tensor([[7.0, 9.0]]).double())
    # equation 10: S (I - k k^T) + v k^T, of the first key in part
    assert torch.allclose(state @ first[0], torch.tensor([[3 + 0.6 * (7 - 1.8), 5 + 0.6 * (9 - 3.0)]]).double())
    half = delta_step(state, 0.5 * one, 0 * one, first, 0 * first)  # nothing is put there, and all that lies there decays
    assert torch.equal(half, 0.5 * state)


def test_a_sequence_is_its_own_and_begins_from_nothing() -> None:
    shape = DeltaShape(key_heads=1, value_heads=2, key=4, value=3, kernel=4)
    drawn = drawn_from(1)
    sizes = {"in_proj_qkv": (shape.mixed, 5), "in_proj_z": (6, 5), "in_proj_a": (2, 5), "in_proj_b": (2, 5), "out_proj": (5, 6)}
    weights = {f"{name}.weight": drawn(*size) for name, size in sizes.items()}
    weights |= {"conv1d.weight": drawn(shape.mixed, 4), "norm.weight": drawn(3), "A_log": drawn(2), "dt_bias": drawn(2)}
    sequences_are_their_own(delta_layer, weights, shape, drawn(9, 5))
    assert torch.allclose(unit(drawn(7, 4)).norm(dim=-1), torch.ones(7).double(), atol=1e-5)


def _model() -> Any:
    """transformers' own Qwen3-Next with the recipe's checkpoint, which SGLang reads too."""
    import transformers

    shape, experts, delta, pair = RECIPE.target, RECIPE.target.experts, RECIPE.target.delta, model_pair(RECIPE.name)
    assert experts is not None
    assert delta is not None
    part, _ = family_of(RECIPE).checkpoint(RECIPE, pair.target, pair.draft)
    weights = {name: tensor.double() for name, tensor in part.weights.items()}
    for layer in range(shape.num_layers):
        weights = fused(weights, f"model.layers.{layer}.", experts.count)
    own = {name: value for name, value in part.config.items() if name not in ("architectures", "model_type")}
    config = transformers.Qwen3NextConfig(
        **own,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_norm_eps,
        layer_types=[("full_attention", "linear_attention")[shape.keeps_state(n)] for n in range(shape.num_layers)],
        rope_parameters={
            "rope_type": "default",
            "rope_theta": shape.rope_theta,
            "partial_rotary_factor": shape.turning / shape.head_dim,
        },
        tie_word_embeddings=False,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    model = transformers.Qwen3NextForCausalLM(config).double().eval()
    model.load_state_dict(weights)
    return model


@pytest.mark.slow  # the import of transformers
def test_every_row_and_what_is_kept_equal_transformers_own_model_in_float64() -> None:
    layers = range(RECIPE.target.num_layers)  # three of its chunks; [N, D, W] there
    rows_and_what_is_kept_equal(_model(), RECIPE.name, 150, CLOSE, layers, lambda state: state[0].mT)


@pytest.mark.slow
def test_the_mtp_layer_is_a_layer_of_transformers_behind_its_projection() -> None:
    """transformers has no such head. Its parts are the target's: norms, and a layer that attends."""
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

    model, pair, head = _model(), model_pair(RECIPE.name), model_pair(RECIPE.name).reference_head(RECIPE)
    _, part = family_of(RECIPE).checkpoint(RECIPE, pair.target, pair.draft)
    served = {name.removeprefix("mtp."): tensor.double() for name, tensor in part.weights.items()}
    assert RECIPE.target.experts is not None
    layer = model.model.layers[-1]
    own = fused(
        {name: tensor for name, tensor in served.items() if name.startswith("layers.")},
        "layers.0.",
        RECIPE.target.experts.count,
    )
    layer.load_state_dict({name.removeprefix("layers.0."): tensor for name, tensor in own.items()})

    def normed(name: str, x: Tensor) -> Tensor:
        norm = Qwen3NextRMSNorm(x.shape[-1], RECIPE.draft.rms_norm_eps).double()
        norm.load_state_dict({"weight": served[f"{name}.weight"]})
        return norm(x)

    tokens, positions = torch.arange(3, 24), torch.arange(21)
    hidden = torch.randn(21, 32, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    ours = draft_rows(head, tokens, hidden, positions, causal(21))
    with torch.no_grad():
        embedded = normed("pre_fc_norm_embedding", model.model.embed_tokens(tokens))
        x = torch.cat([embedded, normed("pre_fc_norm_hidden", hidden)], -1) @ served["fc.weight"].T
        turns = model.model.rotary_emb(x[None], positions[None])
        mask = torch.where(causal(21), 0.0, -torch.inf).double()[None, None]
        out = layer(x[None], position_embeddings=turns, attention_mask=mask)
        theirs = normed("norm", (out[0] if isinstance(out, tuple) else out).view(21, -1))
    near(ours.hidden, theirs, CLOSE)
    near(ours.logits, theirs @ pair.target["lm_head.weight"].double().T, CLOSE)
