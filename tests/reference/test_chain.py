"""Draft rows and chains, against hand-worked examples."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.weights import model_pair
from eagletwin.reference.chain import committed_rows, draft_chain, row_tokens, rows_behind
from eagletwin.reference.eagle import EagleHead, Head, draft_rows
from eagletwin.reference.layers import rotate
from eagletwin.reference.llama import causal, target_rows
from eagletwin.reference.sizes import LlamaShape

# The same float64 sums in another order; rows are of size 1 to 10.
SAME = 1e-11


def _request(name: str, length: int, seed: int) -> tuple[Head, Tensor, Tensor]:
    recipe, pair = RECIPES[name], model_pair(name)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, recipe.target.vocab_size, (length,), generator=generator)
    return pair.reference_head(recipe), tokens, target_rows(pair.reference_target(), recipe.target, tokens).hidden


def _identity_head() -> EagleHead:
    """H = 2, one head of size 2, attention and MLP that add nothing, fc = the hidden state, LM head = identity."""
    shape = LlamaShape(
        vocab_size=2,
        hidden_size=2,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        rope_theta=10.0,
        rms_norm_eps=1e-6,
    )
    eye, zero = torch.eye(2, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64)
    weights = {
        "fc.weight": torch.cat([eye, eye], 1),
        "layers.0.self_attn.q_proj.weight": zero,
        "layers.0.self_attn.k_proj.weight": eye,
        "layers.0.self_attn.v_proj.weight": eye,
        "layers.0.self_attn.o_proj.weight": zero,
        "layers.0.post_attention_layernorm.weight": torch.ones(2, dtype=torch.float64),
        "layers.0.mlp.gate_proj.weight": zero,
        "layers.0.mlp.up_proj.weight": zero,
        "layers.0.mlp.down_proj.weight": zero,
    }
    return EagleHead(weights, shape, embedding=torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64), lm_head=eye)


def test_each_row_consumes_the_token_after_its_position() -> None:
    assert row_tokens(torch.tensor([5, 6, 7, 8])).tolist() == [6, 7, 8]


def test_a_row_adds_the_embedding_of_its_token_to_its_hidden_state() -> None:
    hidden = torch.tensor([[10.0, 0.0], [0.0, 10.0]], dtype=torch.float64)
    rows = draft_rows(_identity_head(), torch.tensor([1, 0]), hidden, torch.arange(2), causal(2))
    assert rows.hidden.tolist() == [[10.0, 1.0], [1.0, 10.0]]
    assert rows.values[0, :, 0].tolist() == [[10.0, 1.0], [1.0, 10.0]]


def test_a_key_turns_by_one_radian_per_position_in_its_fastest_pair() -> None:
    turned = rotate(torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]]], dtype=torch.float64), torch.tensor([0, 2]), 10.0)
    assert turned[0, 0].tolist() == [1.0, 0.0]
    assert torch.allclose(
        turned[1, 0],
        torch.tensor([2.0, 2.0], dtype=torch.float64).cos() * torch.tensor([1, 0])
        + torch.tensor([0, 1]) * torch.tensor(2.0, dtype=torch.float64).sin(),
    )


def test_the_chain_by_hand() -> None:
    """x = [0, 1], so M = 1: row 0 consumes (x[1] = 1, h[0]) and sums to [3, 1]; every later step adds the drafted token."""
    hidden = torch.tensor([[3.0, 0.0]], dtype=torch.float64)
    chain = draft_chain(_identity_head(), torch.tensor([0, 1]), hidden, num_steps=3)
    assert chain.drafted.tolist() == [0, 0, 0]  # [3, 1] -> 0; + embedding(0) = [4, 1] -> 0; [5, 1] -> 0
    assert chain.hidden.tolist() == [[3.0, 1.0], [4.0, 1.0]]  # what decode steps 1 and 2 consume
    assert chain.values[:, 0, 0].tolist() == [[4.0, 1.0], [5.0, 1.0]]  # scratch rows, before RoPE
    angle = torch.tensor([1.0, 2.0], dtype=torch.float64)  # at positions M = 1 and M + 1 = 2
    value = chain.values[:, 0, 0]
    expected = value[:, 0] * angle.cos() - value[:, 1] * angle.sin()
    assert torch.allclose(chain.keys[:, 0, 0, 0], expected)


def test_a_chain_follows_tokens_that_were_chosen_for_it() -> None:
    hidden = torch.tensor([[3.0, 0.0]], dtype=torch.float64)
    chain = draft_chain(_identity_head(), torch.tensor([0, 1]), hidden, num_steps=2, drafted=[1, 1])
    assert chain.drafted.tolist() == [1, 1]
    assert chain.values[0, 0, 0].tolist() == [3.0, 2.0]


@pytest.mark.parametrize("name", sorted(name for name in RECIPES if not (RECIPES[name].mtp_layers or RECIPES[name].frozen)))
def test_committed_rows_do_not_depend_on_what_comes_after(name: str) -> None:
    head, tokens, hidden = _request(name, 24, seed=1)
    whole = committed_rows(head, tokens, hidden)
    for length in (2, 9, 23):
        part = committed_rows(head, tokens[:length], hidden)
        rows = rows_behind(head, length - 1)
        for full, cut in ((whole.keys, part.keys), (whole.values, part.values)):
            assert cut.shape[1] == rows
            assert torch.allclose(full[:, :rows], cut, rtol=0, atol=SAME)  # of latent rows there are no values


def test_a_forward_in_float32_stays_in_float32() -> None:
    head = _identity_head()
    single = replace(
        head,
        weights={name: tensor.float() for name, tensor in head.weights.items()},
        embedding=head.embedding.float(),
        lm_head=head.lm_head.float(),
    )
    hidden = torch.zeros(2, head.shape.hidden_size)
    rows = draft_rows(single, torch.tensor([1, 0]), hidden, torch.arange(2), causal(2))
    assert {part.dtype for part in (rows.hidden, rows.logits, rows.keys, rows.values)} == {torch.float32}
