"""The EAGLE-3 head by hand, one idea at a time, and what it shares with the chain."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.weights import model_pair
from eagletwin.reference.chain import draft_chain
from eagletwin.reference.draft_heads import Eagle3Head, proposed_tokens
from eagletwin.reference.eagle import draft_rows
from eagletwin.reference.llama import causal, target_rows
from eagletwin.reference.sizes import LlamaShape

EAGLE3 = sorted(name for name in RECIPES if RECIPES[name].algorithm == "EAGLE3")
EYE = torch.eye(2, dtype=torch.float64)
ZERO = torch.zeros(2, 2, dtype=torch.float64)
ROOT = 2**0.5  # a state with one entry has this one entry after a norm over H = 2


def _head(**weights: Tensor) -> Eagle3Head:
    """H = 2, V = 3, one head of size 2. Attention reads both halves and adds nothing, nor does the MLP; plain norms."""
    shape = LlamaShape(
        vocab_size=3,
        hidden_size=2,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        rope_theta=10.0,
        rms_norm_eps=0.0,
    )
    ones = torch.ones(2, dtype=torch.float64)
    plain = {
        "fc.weight": torch.cat([EYE, 10 * EYE, 100 * EYE], 1),
        "midlayer.input_layernorm.weight": ones,
        "midlayer.hidden_norm.weight": ones,
        "midlayer.self_attn.q_proj.weight": torch.cat([ZERO, ZERO], 1),
        "midlayer.self_attn.k_proj.weight": torch.cat([EYE, EYE], 1),
        "midlayer.self_attn.v_proj.weight": torch.cat([EYE, 10 * EYE], 1),
        "midlayer.self_attn.o_proj.weight": ZERO,
        "midlayer.post_attention_layernorm.weight": ones,
        "midlayer.mlp.gate_proj.weight": ZERO,
        "midlayer.mlp.up_proj.weight": ZERO,
        "midlayer.mlp.down_proj.weight": ZERO,
        "norm.weight": ones,
        "lm_head.weight": EYE,
    }
    embedding = torch.tensor([[5.0, 0.0], [0.0, 7.0], [0.0, -7.0]], dtype=torch.float64)
    return Eagle3Head(plain | weights, shape, embedding, proposes=torch.tensor([2, 0]))


def _row(head: Eagle3Head, token: int, hidden: list[float]) -> tuple[Tensor, Tensor, Tensor]:
    """hidden, logits and value of a single row at position 0."""
    state = torch.tensor([hidden], dtype=torch.float64)
    rows = draft_rows(head, torch.tensor([token]), state, torch.arange(1), causal(1))
    return rows.hidden[0], rows.logits[0], rows.values[0, 0, 0]


def test_d2t_holds_differences() -> None:
    assert proposed_tokens(torch.tensor([3, 0, -2, 4])).tolist() == [3, 1, 0, 7]


def test_fc_makes_one_state_of_the_three_that_the_target_hands_over() -> None:
    handed = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]], dtype=torch.float64)
    assert _head().feed(handed).tolist() == [[1 + 30 + 500, 2 + 40 + 600]]


def test_logits_are_over_the_targets_vocabulary_and_minus_infinity_where_the_draft_cannot_propose() -> None:
    _, logits, _ = _row(_head(), 0, [3.0, -4.0])
    scale = ROOT / 5  # the norm of [3, -4]
    assert logits[1] == -torch.inf
    assert logits[[2, 0]].tolist() == pytest.approx([3 * scale, -4 * scale])  # draft ids 0 and 1 stand for tokens 2 and 0


def test_the_final_norm_is_in_the_logits_and_not_in_the_state_that_is_fed_on() -> None:
    hidden, logits, _ = _row(_head(), 0, [30.0, 40.0])
    assert hidden.tolist() == [30.0, 40.0]
    assert logits[[2, 0]].tolist() == pytest.approx([ROOT * 0.6, ROOT * 0.8])


def test_attention_reads_the_normed_embedding_beside_the_normed_state() -> None:
    _, _, value = _row(_head(), 0, [0.0, 9.0])
    assert value.tolist() == pytest.approx([ROOT, 10 * ROOT])
    weighted = {"midlayer.input_layernorm.weight": 2 * torch.ones(2).double(), "midlayer.hidden_norm.weight": EYE.sum(0) * 3}
    _, _, value = _row(_head(**weighted), 0, [0.0, 9.0])
    assert value.tolist() == pytest.approx([2 * ROOT, 30 * ROOT])


def test_the_residual_sum_is_the_states_alone_and_the_token_reaches_it_through_attention() -> None:
    hidden, _, _ = _row(_head(), 1, [3.0, 4.0])
    assert hidden.tolist() == [3.0, 4.0]
    passed = _head(**{"midlayer.self_attn.o_proj.weight": EYE, "midlayer.self_attn.v_proj.weight": torch.cat([EYE, ZERO], 1)})
    hidden, _, _ = _row(passed, 1, [3.0, 4.0])
    assert hidden.tolist() == pytest.approx([3.0, 4.0 + ROOT])


def test_draft_decode_consumes_the_heads_own_state_and_fc_is_left_out() -> None:
    head = _head(**{"midlayer.self_attn.o_proj.weight": EYE, "midlayer.self_attn.v_proj.weight": torch.cat([EYE, ZERO], 1)})
    handed = torch.tensor([[3.0, 0.0, 0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    chain = draft_chain(head, torch.tensor([0, 0]), handed, num_steps=3)
    # row 0: [3, 0] + [√2, 0]; draft id 0, token 2, whose embedding is [0, -√2]; step 1 attends to two rows alike
    assert chain.drafted[0] == 2
    assert chain.hidden[0].tolist() == pytest.approx([3 + ROOT, 0.0])
    assert chain.handed_on[0].tolist() == pytest.approx([3 + 1.5 * ROOT, -0.5 * ROOT])
    assert torch.equal(chain.hidden[1], chain.handed_on[0])


@pytest.mark.parametrize("name", EAGLE3)
def test_rows_after_others_equal_all_rows_at_once(name: str) -> None:
    recipe, pair = RECIPES[name], model_pair(name)
    head, tokens = pair.reference_head(recipe), torch.arange(20, 29)
    hidden = head.feed(target_rows(pair.reference_target(), recipe.target, tokens).hidden[:8])
    whole = draft_rows(head, tokens[1:], hidden, torch.arange(8), causal(8))
    first = draft_rows(head, tokens[1:6], hidden[:5], torch.arange(5), causal(5))
    after = draft_rows(head, tokens[6:], hidden[5:], torch.arange(5, 8), causal(8)[5:], before=first)
    for mine, other in ((after.hidden, whole.hidden[5:]), (after.keys, whole.keys[:, 5:]), (after.values, whole.values[:, 5:])):
        assert mine.shape == other.shape
        assert torch.allclose(mine, other, rtol=0, atol=1e-11)  # of latent rows, values are empty


@pytest.mark.parametrize("name", EAGLE3)
def test_what_a_target_hands_over_is_its_residual_stream_at_the_named_layers_in_order(name: str) -> None:
    recipe, weights = RECIPES[name], model_pair(name).reference_target()
    tokens = torch.arange(9)
    handed = target_rows(weights, recipe.target, tokens).hidden.unflatten(-1, (-1, recipe.target.hidden_size))
    for layer, state in zip(recipe.target.aux_layers, handed.unbind(1), strict=True):
        until = replace(recipe.target, num_layers=layer + 1, aux_layers=())
        assert torch.equal(state, target_rows(weights, until, tokens).residual)
