"""Layers with a window: what a row sees. test_llama_against_transformers.py has them against transformers' own."""

import pytest
import torch

from eagletwin.reference.llama import causal, in_window, target_rows
from eagletwin.reference.sizes import LlamaShape


def test_a_row_sees_the_last_rows_of_those_before_it() -> None:
    sees = in_window(causal(6), 3)
    assert [row.nonzero().flatten().tolist() for row in sees] == [[0], [0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5]]
    assert torch.equal(in_window(causal(6), 0), causal(6))


def test_on_a_branch_of_a_tree_only_its_own_rows_are_counted() -> None:
    """Prefix 0 1 2, node 3 behind it, nodes 4 and 5 behind that, node 6 behind 5: nodes of other branches take no room."""
    sees = torch.tensor([[1, 1, 1, 1, 0, 1, 1]], dtype=torch.bool)
    assert in_window(sees, 4)[0].nonzero().flatten().tolist() == [2, 3, 5, 6]


@pytest.mark.parametrize("window", [1, 4])
def test_sequences_side_by_side_have_windows_of_their_own(window: int) -> None:
    torch.manual_seed(6)
    shape = LlamaShape(
        vocab_size=9,
        hidden_size=16,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=16,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        windows=(window,),
    )
    names = {"self_attn.q_proj": 16, "self_attn.k_proj": 16, "self_attn.v_proj": 16, "self_attn.o_proj": 16}
    weights = {f"model.layers.0.{name}.weight": torch.randn(16, 16) for name in names}
    weights |= {f"model.layers.0.mlp.{name}_proj.weight": torch.randn(16, 16) for name in ("gate", "up", "down")}
    weights |= {f"model.layers.0.{name}_layernorm.weight": torch.randn(16) for name in ("input", "post_attention")}
    weights |= {"model.norm.weight": torch.randn(16), "model.embed_tokens.weight": torch.randn(9, 16)}
    weights = {name: tensor.double() for name, tensor in (weights | {"lm_head.weight": torch.randn(9, 16)}).items()}
    one, other = torch.randint(0, 9, (7,)), torch.randint(0, 9, (5,))
    together = target_rows(weights, shape, torch.cat([one, other]), [7, 5]).logits
    apart = torch.cat([target_rows(weights, shape, tokens).logits for tokens in (one, other)])
    assert torch.allclose(together, apart, rtol=0, atol=1e-12)
