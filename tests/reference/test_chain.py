"""Draft rows and chains: against hand-worked examples, and the fast form against the naive one."""

import pytest
import torch
from torch import Tensor

from eagletwin.harness.models.recipes import RECIPES
from eagletwin.harness.models.weights import model_pair
from eagletwin.reference.chain import Chain, committed_rows, draft_chain, draft_chains, row_tokens
from eagletwin.reference.eagle import EagleHead, Head, draft_rows
from eagletwin.reference.llama import LlamaShape, causal, rotate, target_rows

# Both forms do the same float64 sums in another order; rows are of size 1 to 10.
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


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_committed_rows_do_not_depend_on_what_comes_after(name: str) -> None:
    head, tokens, hidden = _request(name, 24, seed=1)
    whole = committed_rows(head, tokens, hidden)
    for length in (2, 9, 23):
        part = committed_rows(head, tokens[:length], hidden)
        for full, cut in ((whole.keys, part.keys), (whole.values, part.values)):
            assert (full[:, : length - 1] - cut).abs().max() < SAME


@pytest.mark.parametrize("num_steps", [1, 2, 5])
@pytest.mark.parametrize("name", sorted(RECIPES))
def test_all_rounds_at_once_equal_each_round_by_itself(name: str, num_steps: int) -> None:
    head, tokens, hidden = _request(name, 30, seed=2)
    prefixes = [1, 2, 7, 7, 28, 29]
    drafted = torch.randint(0, head.shape.vocab_size, (len(prefixes), num_steps), generator=torch.Generator().manual_seed(4))
    committed, chains = draft_chains(head, [tokens], hidden[:-1], [(0, prefix) for prefix in prefixes], drafted)
    naive = committed_rows(head, tokens, hidden)
    for mine, other in ((committed.hidden, naive.hidden), (committed.keys, naive.keys), (committed.logits, naive.logits)):
        assert _apart(mine, other) < SAME
    for prefix, row, chain in zip(prefixes, drafted, chains, strict=True):
        _assert_same(chain, draft_chain(head, tokens[: prefix + 1], hidden, num_steps, drafted=row.tolist()))


def _apart(mine: Tensor, other: Tensor) -> float:
    """Largest difference. Logits of a token that cannot be proposed are -inf in both."""
    return float(torch.where(mine == other, 0.0, (mine - other).abs()).max())


def _assert_same(chain: Chain, alone: Chain) -> None:
    assert chain.drafted.tolist() == alone.drafted.tolist()
    for part in ("logits", "hidden", "handed_on", "keys", "values"):
        mine, other = getattr(chain, part), getattr(alone, part)
        assert mine.shape == other.shape
        assert not mine.numel() or _apart(mine, other) < SAME


@pytest.mark.parametrize("num_steps", [1, 2, 5])
@pytest.mark.parametrize("name", sorted(RECIPES))
def test_requests_side_by_side_equal_each_request_by_itself(name: str, num_steps: int) -> None:
    """Of different lengths, with rounds in no order, one request without any, and one with a single row."""
    requests = [_request(name, length, seed) for seed, length in enumerate((9, 2, 30, 4))]
    head, tokens = requests[0][0], [tokens for _, tokens, _ in requests]
    recipe, lengths = RECIPES[name], [len(sequence) - 1 for sequence in tokens]
    together = target_rows(
        model_pair(name).reference_target(), recipe.target, torch.cat([sequence[:-1] for sequence in tokens]), lengths
    )
    rounds = [(2, 29), (0, 1), (2, 3), (1, 1), (0, 8), (2, 3)]
    drafted = torch.randint(0, head.shape.vocab_size, (len(rounds), num_steps), generator=torch.Generator().manual_seed(7))
    committed, chains = draft_chains(head, tokens, together.hidden, rounds, drafted)
    begin = 0
    for length, (_, sequence, hidden) in zip(lengths, requests, strict=True):
        alone, mine = committed_rows(head, sequence, hidden), slice(begin, begin + length)
        assert (together.hidden[mine] - hidden[:length]).abs().max() < SAME
        assert (committed.hidden[mine] - alone.hidden).abs().max() < SAME
        assert (committed.keys[:, mine] - alone.keys).abs().max() < SAME
        begin += length
    for (request, prefix), row, chain in zip(rounds, drafted, chains, strict=True):
        _, sequence, hidden = requests[request]
        _assert_same(chain, draft_chain(head, sequence[: prefix + 1], hidden, num_steps, drafted=row.tolist()))


def test_no_round_is_no_chain() -> None:
    head, tokens, hidden = _request("llama-tiny", 5, seed=3)
    committed, chains = draft_chains(head, [tokens], hidden[:4], [], torch.empty(0, 3, dtype=torch.int64))
    assert chains == []
    assert committed.keys.shape[1] == 4
