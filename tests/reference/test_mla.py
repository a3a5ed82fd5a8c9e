"""Latent attention, experts and the NextN layer: against transformers' own DeepSeek-V3, and in their other forms."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.weights import model_pair
from eagletwin.reference.chain import committed_rows
from eagletwin.reference.experts import experts, gated, route
from eagletwin.reference.layers import latent_attention, rms_norm, rotate
from eagletwin.reference.llama import causal, target_rows
from eagletwin.reference.sizes import ExpertShape, LatentShape, LlamaShape

from .deepseek import config_of, half_split, near
from .fused import fused

RECIPE = RECIPES["deepseek-nextn"]


def _shape() -> tuple[LlamaShape, LatentShape, ExpertShape]:
    shape = RECIPE.target
    assert shape.latent is not None
    assert shape.experts is not None
    return shape, shape.latent, shape.experts


def _attention(layer: int = 0) -> dict[str, Tensor]:
    prefix = f"model.layers.{layer}.self_attn."
    weights = model_pair(RECIPE.name).reference_target()
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def _inner(rows: int = 23) -> Tensor:
    return torch.randn(rows, RECIPE.target.hidden_size, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def _absorbed(weights: dict[str, Tensor], inner: Tensor, stored: Tensor) -> Tensor:
    """Attention to the latent rows themselves, as queries of their width: both matrices moved."""
    shape, latent, _ = _shape()
    heads, positions = shape.num_heads, torch.arange(len(inner))
    compressed = rms_norm(linear(inner, weights["q_a_proj.weight"]), weights["q_a_layernorm.weight"], shape.rms_norm_eps)
    query = linear(compressed, weights["q_b_proj.weight"]).view(len(inner), heads, -1)  # [R, N, D+P]
    turned = rotate(query[..., latent.plain :], positions, shape.rope_theta, interleaved=True)  # [R, N, P]
    of_head = weights["kv_b_proj.weight"].view(heads, latent.plain + latent.value, latent.rank)  # [N, D+W, C]
    to_keys, to_values = of_head.split([latent.plain, latent.value], 1)
    moved = torch.einsum("rnd,ndc->rnc", query[..., : latent.plain], to_keys)  # [R, N, C]
    score = torch.einsum("rnc,ec->nre", torch.cat([moved, turned], -1), stored[:, 0])
    weight = torch.where(causal(len(inner)), score / query.shape[-1] ** 0.5, -torch.inf).softmax(-1)  # [N, R, R]
    summed = torch.einsum("nre,ec->rnc", weight, stored[:, 0, : latent.rank])  # [R, N, C]
    return torch.einsum("rnc,nwc->rnw", summed, to_values).flatten(1)


def test_the_absorbed_form_is_the_same_number() -> None:
    shape, latent, _ = _shape()
    weights, inner = _attention(), _inner()
    attended, stored = latent_attention(weights, "", shape, latent, inner, torch.arange(len(inner)), causal(len(inner)))
    assert stored.shape == (len(inner), 1, latent.rank + latent.rope)
    assert torch.allclose(attended, _absorbed(weights, inner, stored), rtol=0, atol=1e-12)


def test_the_absorbed_form_tells_swapped_halves_and_a_transposed_matrix_apart() -> None:
    shape, latent, _ = _shape()
    weights, inner = _attention(), _inner()
    attended, stored = latent_attention(weights, "", shape, latent, inner, torch.arange(len(inner)), causal(len(inner)))
    swapped = torch.cat([stored[..., latent.rope :], stored[..., : latent.rope]], -1)
    assert not torch.allclose(attended, _absorbed(weights, inner, swapped), rtol=0, atol=1e-2)
    # widths of keys and values are the same, so that a matrix of the one has the shape of the other
    halves = weights["kv_b_proj.weight"].view(shape.num_heads, 2, latent.plain, latent.rank).flip(1)
    other = weights | {"kv_b_proj.weight": halves.reshape(weights["kv_b_proj.weight"].shape)}
    assert not torch.allclose(attended, _absorbed(other, inner, stored), rtol=0, atol=1e-2)


def test_rows_behind_stored_ones_are_those_of_one_forward() -> None:
    shape, latent, _ = _shape()
    weights, inner, cut = _attention(), _inner(), 9
    positions, sees = torch.arange(len(inner)), causal(len(inner))
    whole, stored = latent_attention(weights, "", shape, latent, inner, positions, sees)
    rest, added = latent_attention(weights, "", shape, latent, inner[cut:], positions[cut:], sees[cut:], stored[:cut])
    assert torch.allclose(whole[cut:], rest, rtol=0, atol=1e-12)
    assert torch.allclose(stored[cut:], added, rtol=0, atol=1e-12)


def test_a_turned_pair_lies_side_by_side() -> None:
    x = torch.tensor([[[1.0, 0.0, 0.0, 1.0]]], dtype=torch.float64)  # two pairs, [1, 0] and [0, 1]
    angles = torch.tensor([1.0, 100.0**-0.5]) * 3  # position 3, theta 100
    expected = [angles[0].cos(), angles[0].sin(), -angles[1].sin(), angles[1].cos()]
    turned = rotate(x, torch.tensor([3]), 100.0, interleaved=True)
    assert torch.allclose(turned.flatten(), torch.stack(expected).double(), atol=1e-7)


def test_a_router_chooses_groups_by_two_experts_and_experts_by_biased_affinity() -> None:
    shape = ExpertShape(count=6, chosen=1, inner=1, affinity="sigmoid", shared=True, groups=3, kept=1, scale=2.0)
    wanted = torch.tensor([[0.90, 0.10, 0.60, 0.55, 0.50, 0.50]], dtype=torch.float64)  # groups of 1.00, 1.15 and 1.00
    weights = {"gate.weight": wanted.logit().T, "gate.e_score_correction_bias": torch.zeros(6, dtype=torch.float64)}
    one = torch.ones(1, 1, dtype=torch.float64)
    assert route(weights, "", shape, one).chosen.tolist() == [[2]]  # not expert 0, the best of all
    weights["gate.e_score_correction_bias"][3] = 0.1
    biased = route(weights, "", shape, one)
    assert biased.chosen.tolist() == [[3]]
    assert biased.weight.tolist() == [[1.0]]  # the bias is in no weight


def test_weights_of_experts_sum_to_the_scale_and_the_shared_expert_is_added_once() -> None:
    _, _, shape = _shape()
    weights = model_pair(RECIPE.name).reference_target()
    prefix, inner = f"model.layers.{RECIPE.target.num_layers - 1}.mlp.", _inner()
    routing = route(weights, prefix, shape, inner)
    expected = gated(weights, f"{prefix}shared_experts.", inner)
    for row in range(len(inner)):
        for expert, weight in zip(routing.chosen[row].tolist(), routing.weight[row], strict=True):
            expected[row] += shape.scale * weight * gated(weights, f"{prefix}experts.{expert}.", inner[row])
    assert torch.allclose(experts(weights, prefix, shape, inner), expected, rtol=0, atol=1e-12)
    assert torch.allclose(routing.weight.sum(-1), torch.ones(len(inner), dtype=torch.float64))
    assert len(set(routing.chosen.flatten().tolist())) == shape.count  # each of them is chosen by some row


@pytest.mark.slow  # the import of transformers
@pytest.mark.parametrize("name", ["deepseek-nextn", "deepseek-nextn-yarn"])
def test_target_and_nextn_layer_equal_transformers_deepseek_v3_in_float64(name: str) -> None:
    from transformers import DeepseekV3ForCausalLM
    from transformers.modeling_layers import MtpLayer
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RMSNorm

    recipe, pair, config = RECIPES[name], model_pair(name), config_of(RECIPES[name])
    shape, (_, latent, of_experts) = recipe.target, _shape()
    weights, last = pair.reference_target(), f"model.layers.{shape.num_layers - 1}."
    model = DeepseekV3ForCausalLM(config).double().eval()
    model.load_state_dict(fused(weights, last, of_experts.count))
    tokens = torch.randint(0, shape.vocab_size, (33,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        theirs = model.model(tokens[None], use_cache=True)
        logits = model.lm_head(theirs.last_hidden_state)[0]
    ours = target_rows(weights, shape, tokens)
    assert near(ours.hidden, theirs.last_hidden_state[0])
    assert near(ours.logits, logits)
    for layer in range(shape.num_layers):
        kept = theirs.past_key_values.layers[layer]
        assert near(ours.keys[layer, :, 0, : latent.rank], kept.keys[0, 0])
        assert near(half_split(ours.keys[layer, :, 0, latent.rank :]), kept.values[0, 0])

    head = pair.reference_head(recipe)
    draft = MtpLayer(config, DeepseekV3DecoderLayer, DeepseekV3RMSNorm, shape.num_layers - 1).double().eval()
    own = {name.replace("layers.0.", "mtp_block."): tensor for name, tensor in head.weights.items()}
    own["post_norm.weight"] = own.pop("norm.weight")
    draft.load_state_dict(fused(own, "mtp_block.", of_experts.count))
    rows, positions = len(tokens) - 1, torch.arange(len(tokens) - 1)
    mask = torch.where(causal(rows), 0.0, -torch.inf)[None, None].double()
    with torch.no_grad():
        handed = draft(
            model.model.embed_tokens(tokens[None, 1:]),
            theirs.last_hidden_state[:, :-1],
            position_embeddings=model.model.rotary_emb(theirs.last_hidden_state[:, :-1], positions[None]),
            attention_mask=mask,
            position_ids=positions[None],
            past_key_values=None,
        )[0]
    drafted = committed_rows(head, tokens, ours.hidden)
    assert near(drafted.hidden, handed)  # the normed state is handed on
    assert near(drafted.logits, model.lm_head(handed).detach())
