"""Latent attention, experts and assistants, against transformers' own DeepSeek-V3, Kimi K2 and Gemma-4."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from eagletwin.harness.families import RECIPES, family_of
from eagletwin.harness.families.weights import model_pair
from eagletwin.reference import layers
from eagletwin.reference.chain import committed_rows, draft_chain
from eagletwin.reference.draft_heads import Eagle3Head, FrozenHead
from eagletwin.reference.experts import experts, gated_mlp, route
from eagletwin.reference.growth import draft_tree
from eagletwin.reference.layers import latent_attention, rms_norm, rotate
from eagletwin.reference.llama import TargetRows, causal, target_rows
from eagletwin.reference.rounds import committed_side_by_side, draft_rounds, grow_rounds
from eagletwin.reference.sizes import ExpertShape, LatentShape, LlamaShape

from .beside import assert_near as gemma4_near
from .beside import config_of, fused, half_split, near

# Latent attention, experts and the NextN layer: against transformers' own DeepSeek-V3, and in their other forms.


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
    expected = gated_mlp(weights, f"{prefix}shared_experts.", inner)
    for row in range(len(inner)):
        for expert, weight in zip(routing.chosen[row].tolist(), routing.weight[row], strict=True):
            expected[row] += shape.scale * weight * gated_mlp(weights, f"{prefix}experts.{expert}.", inner[row])
    assert torch.allclose(experts(weights, prefix, shape, inner), expected, rtol=0, atol=1e-12)
    assert torch.allclose(routing.weight.sum(-1), torch.ones(len(inner), dtype=torch.float64))
    assert len(set(routing.chosen.flatten().tolist())) == shape.count  # each of them is chosen by some row


# Chosen rows: against transformers' DeepSeek-V3.2, which leaves FP8 and Hadamard's matrix out, and by hand.

CHOOSING = RECIPES["deepseek-dsa"]


def _choose(inner: Tensor, **more: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Which rows each row attends to; the attention's weights, and what its queries are made of."""
    prefix, shape, rows = "model.layers.1.self_attn.", CHOOSING.target, len(inner)
    whole = model_pair(CHOOSING.name).reference_target()
    weights = {name.removeprefix(prefix): tensor for name, tensor in whole.items() if name.startswith(prefix)}
    compressed = rms_norm(linear(inner, weights["q_a_proj.weight"]), weights["q_a_layernorm.weight"], shape.rms_norm_eps)
    given = weights | {f"indexer.{name}": tensor for name, tensor in more.items()}
    sees, _ = layers.choose_rows(given, "indexer.", shape, compressed, inner, torch.arange(rows), causal(rows), None)
    return sees, weights, compressed


@pytest.mark.slow  # the import of transformers
def test_chosen_rows_are_those_of_transformers_deepseek_v32(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.deepseek_v32.configuration_deepseek_v32 import DeepseekV32Config
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer

    shape, inner, rows = CHOOSING.target, _inner(40), 40
    latent, index = shape.latent, shape.index
    assert latent is not None
    assert index is not None
    rounded, weights, compressed = _choose(inner)
    monkeypatch.setattr(layers, "round_to_fp8", lambda x, off=0.0: (x, off * x))
    exact, _, _ = _choose(inner)
    sizes = {"index_n_heads": index.heads, "index_head_dim": index.width, "index_topk": index.chosen}
    of_model = {"hidden_size": shape.hidden_size, "q_lora_rank": latent.query_rank, "qk_rope_head_dim": latent.rope}
    indexer = DeepseekV32Indexer(DeepseekV32Config(**sizes, **of_model), 0).double()
    indexer.load_state_dict(
        {name.removeprefix("indexer."): tensor for name, tensor in weights.items() if name.startswith("indexer.")}
    )
    cos, sin = (
        torch.cat([part[:rows, 0]] * 2, -1)[None]
        for part in layers.turns(64, latent.rope // 2, shape.rope_theta, None, torch.float64, torch.device("cpu"))
    )
    theirs = indexer(inner[None], compressed[None], (cos, sin), causal(rows)[None], torch.arange(rows)[None])[0]
    expected = torch.zeros(rows, rows, dtype=torch.bool).scatter(1, theirs.long(), True) & causal(rows)
    assert torch.equal(exact, expected)
    assert (rounded != exact).any(-1).float().mean() < 0.2  # of rows that FP8 decides otherwise


def test_a_choice_of_rows_is_followed_where_rounding_admits_it() -> None:
    inner, rows = _inner(40), 40
    own, _, _ = _choose(inner)
    order = own[-1].nonzero()[:, 0].tolist()
    for given, within, followed in (
        (order, 0.0, True),
        ([*order[1:], next(n for n in range(rows) if n not in order)], 0.0, False),  # another row
        ([*order[1:], next(n for n in range(rows) if n not in order)], 10.0, True),  # where scores may be far off
        (order[1:], 10.0, False),  # one short
    ):
        chosen = torch.full((rows, len(order)), -1)
        chosen[-1, : len(given)] = torch.tensor(given)
        sees, _, _ = _choose(inner, chosen=chosen, within=torch.tensor([within, 0.0, 0.0]))
        assert torch.equal(sees[:-1], own[:-1])
        assert (sorted(sees[-1].nonzero()[:, 0].tolist()) == sorted(given)) == followed


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

    head = pair.reference_heads(recipe)[0]
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


# Kimi K2's target and its EAGLE-3 head of latent attention against transformers' own DeepSeek-V3, in float64.


KIMI_K2_RECIPE = RECIPES["kimi-k2-eagle3"]


@pytest.mark.slow  # the import of transformers
def test_target_and_head_equal_transformers_deepseek_v3_in_float64() -> None:
    from transformers import DeepseekV3ForCausalLM

    shape, pair, config = KIMI_K2_RECIPE.target, model_pair(KIMI_K2_RECIPE.name), config_of(KIMI_K2_RECIPE)
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

    head = pair.reference_heads(KIMI_K2_RECIPE)[0]
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

    config, shape = config_of(KIMI_K2_RECIPE, dense=KIMI_K2_RECIPE.target.num_layers), KIMI_K2_RECIPE.draft
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


# Gemma-4 and its assistant against transformers' own models, and what makes the assistant another kind of draft.


NAMES = sorted(name for name in RECIPES if RECIPES[name].frozen)
COUNT = 24  # longer than the short window, shorter than the long one
# transformers works its rotary angles out in float32, and norms in it.
CLOSE = 2e-6


def tokens_of(name: str) -> Tensor:
    return torch.randint(0, RECIPES[name].target.vocab_size, (COUNT,), generator=torch.Generator().manual_seed(3))


def rows_of(name: str) -> TargetRows:
    return target_rows(model_pair(name).reference_target(), RECIPES[name].target, tokens_of(name)[:-1])


def head_of(name: str) -> FrozenHead:
    rows = rows_of(name)
    head = model_pair(name).reference_heads(RECIPES[name])[0]
    assert isinstance(head, FrozenHead)
    return replace(head, memory=(rows.keys, rows.values))


def models(name: str) -> tuple[Any, Any]:
    """Target and assistant, in float64, by the configurations of the recipe's checkpoint."""
    from transformers import (
        Gemma4AssistantConfig,
        Gemma4AssistantForCausalLM,
        Gemma4ForCausalLM,
        Gemma4TextConfig,
    )

    recipe, pair = RECIPES[name], model_pair(name)
    target, draft = family_of(recipe).checkpoint(recipe, pair.target, pair.draft)
    config = Gemma4TextConfig(**target.config, attn_implementation="eager")
    served = Gemma4ForCausalLM(config).double().eval()
    missing, unexpected = served.load_state_dict({key: part.double() for key, part in target.weights.items()}, strict=False)
    assert not unexpected, unexpected
    assert not [key for key in missing if "rotary" not in key], missing
    text = Gemma4TextConfig(**draft.config["text_config"], attn_implementation="eager")  # type: ignore[arg-type]
    own = {key: draft.config[key] for key in ("backbone_hidden_size", "tie_word_embeddings")}
    assistant = Gemma4AssistantForCausalLM(Gemma4AssistantConfig(text_config=text, **own)).double().eval()
    missing, unexpected = assistant.load_state_dict({key: part.double() for key, part in draft.weights.items()}, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"model.embed_tokens.weight"}, missing
    return served, assistant


@pytest.mark.parametrize("name", NAMES)
def test_the_target_is_transformers_gemma_4(name: str) -> None:
    served, _ = models(name)
    ours = rows_of(name)
    with torch.no_grad():
        theirs = served(tokens_of(name)[None, :-1], output_hidden_states=True, use_cache=True)
    gemma4_near(ours.logits, theirs.logits[0], CLOSE)
    gemma4_near(ours.hidden, theirs.hidden_states[-1][0], CLOSE)
    for layer, window in enumerate(RECIPES[name].target.windows):
        if not window:
            gemma4_near(ours.keys[layer], theirs.past_key_values.layers[layer].keys[0].transpose(0, 1), CLOSE)
            gemma4_near(ours.values[layer], theirs.past_key_values.layers[layer].values[0].transpose(0, 1), CLOSE)


@pytest.mark.parametrize("name", NAMES)
def test_each_forward_is_transformers_assistant_on_the_targets_rows(name: str) -> None:
    """At the position of the last row, with the rows that a window of that row has: what an engine gives the model."""
    _, assistant = models(name)
    recipe, tokens, rows, head = RECIPES[name], tokens_of(name), rows_of(name), head_of(name)
    last = COUNT - 2
    shared = {}
    for read, window in zip(head.reads, recipe.draft.windows, strict=True):
        kept = slice(-window if window else None, None)
        kind = "sliding_attention" if window else "full_attention"
        shared[kind] = tuple(part[read, kept].transpose(0, 1)[None] for part in (rows.keys, rows.values))
    ours = draft_chain(head, tokens, rows.hidden, 3)
    consumed = [int(tokens[-1]), *ours.drafted[:-1].tolist()]
    state = rows.hidden[last]
    for step, token in enumerate(consumed):
        embedded = head.embedding[token] * head.embedding.shape[1] ** 0.5
        with torch.no_grad():
            out = assistant(
                inputs_embeds=torch.cat([embedded, state])[None, None],
                position_ids=torch.tensor([[last]]),
                shared_kv_states=shared,
            )
        gemma4_near(ours.logits[step], out.logits[0, 0], CLOSE)
        state = out.last_hidden_state[0, 0]
        if step:
            gemma4_near(ours.handed_on[step - 1], state, CLOSE)


@pytest.mark.parametrize("name", NAMES)
def test_many_rounds_at_once_are_those_drafted_one_at_a_time(name: str) -> None:
    tokens, rows, head = tokens_of(name), rows_of(name), head_of(name)
    committed = committed_side_by_side(head, [tokens], rows.hidden)
    topk, steps = 3, 3
    for at in (COUNT - 1, 5):
        prefix = replace(head, memory=(rows.keys[:, :at], rows.values[:, :at]))
        alone = draft_tree(prefix, tokens[: at + 1], rows.hidden, topk, steps)
        together = grow_rounds(head, committed, [COUNT - 1], [(0, at)], topk, steps, "true_tree")
        torch.testing.assert_close(together.logits[0], alone.logits)
        torch.testing.assert_close(together.handed_on[0], alone.handed_on)
        followed = draft_rounds(
            head, committed, [COUNT - 1], [(0, at)], alone.tokens[None], alone.expanded[None], "slot_layout"
        )
        torch.testing.assert_close(followed.logits[0], alone.logits)  # no row sees another of its round
        chain = draft_chain(prefix, tokens[: at + 1], rows.hidden, steps)
        torch.testing.assert_close(chain.logits[0], alone.logits[0])


def test_a_head_without_the_targets_rows_says_so() -> None:
    head = replace(head_of(NAMES[0]), memory=None)
    with pytest.raises(ValueError, match="without them"):
        draft_chain(head, tokens_of(NAMES[0]), rows_of(NAMES[0]).hidden, 2)
