"""The target of gpt-oss: windows, sinks, biases and experts with clamped gates, against transformers' own model."""

import pytest
import torch
from torch import Tensor

from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.weights import model_pair
from eagletwin.reference.experts import route_clamped
from eagletwin.reference.llama import target_rows

RECIPE = RECIPES["gpt-oss-eagle3"]


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return model_pair(RECIPE.name).reference_target()


@pytest.mark.slow  # the import of transformers
def test_every_row_equals_transformers_gpt_oss_in_float64(weights: dict[str, Tensor]) -> None:
    from transformers import GptOssConfig, GptOssForCausalLM

    shape, clamped = RECIPE.target, RECIPE.target.clamped
    assert clamped is not None
    config = GptOssConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=clamped.inner,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_norm_eps,
        num_local_experts=clamped.count,
        num_experts_per_tok=clamped.chosen,
        sliding_window=max(shape.windows),
        layer_types=[("full_attention", "sliding_attention")[window > 0] for window in shape.windows],
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        attention_bias=True,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    model = GptOssForCausalLM(config).double().eval()
    model.load_state_dict(weights)
    tokens = torch.randint(0, shape.vocab_size, (33,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        theirs = model.model(tokens[None], output_hidden_states=True)
        logits = model.lm_head(theirs.last_hidden_state)[0]
    ours = target_rows(weights, shape, tokens)
    handed = torch.cat([theirs.hidden_states[layer + 1][0] for layer in shape.aux_layers], -1)
    # transformers works out its rotary angles in float32 whatever the dtype: 1e-6 of the largest number is what that leaves
    for mine, other in ((ours.hidden, handed), (ours.logits, logits)):
        assert (mine - other).abs().max() <= 1e-6 * other.abs().max()


@pytest.mark.parametrize(
    "missing", ["self_attn.sinks", "mlp.router.bias", "mlp.experts.down_proj_bias", "self_attn.o_proj.bias"]
)
def test_no_part_of_it_is_too_small_to_be_seen(weights: dict[str, Tensor], missing: str) -> None:
    """Ten times the bound of a float, in nine rows of ten."""
    tokens = torch.randint(0, RECIPE.target.vocab_size, (33,), generator=torch.Generator().manual_seed(3))
    right = target_rows(weights, RECIPE.target, tokens).hidden
    nothing = -torch.inf if missing == "self_attn.sinks" else 0.0
    without = {name: torch.full_like(tensor, nothing) if name.endswith(missing) else tensor for name, tensor in weights.items()}
    off = (target_rows(without, RECIPE.target, tokens).hidden - right).abs().amax(1) / right.abs().amax(1)
    assert (off > 1e-3).float().mean() > 0.9


def test_gates_reach_their_limit_and_every_expert_is_chosen(weights: dict[str, Tensor]) -> None:
    clamped = RECIPE.target.clamped
    assert clamped is not None
    inner = torch.randn(200, RECIPE.target.hidden_size, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    prefix = "model.layers.1.mlp."
    chosen = route_clamped(weights, prefix, clamped, inner)
    assert chosen.experts.unique().tolist() == list(range(clamped.count))
    assert torch.allclose(chosen.weight.sum(-1), torch.ones(200, dtype=torch.float64))
    both = inner @ weights[f"{prefix}experts.gate_up_proj"][0]
    assert 0 < (both.abs() > clamped.limit).double().mean() < 0.2
