"""Chains, EAGLE-3 heads and multi-layer drafts: by hand, and against what transformers drafts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.store import checkpoints
from eagletwin.harness.families.weights import model_pair
from eagletwin.reference.chain import committed_rows, draft_chain, row_tokens, rows_behind
from eagletwin.reference.draft_heads import Eagle3Head, proposed_tokens
from eagletwin.reference.eagle import DraftRows, EagleHead, Head, draft_rows
from eagletwin.reference.layers import rotate
from eagletwin.reference.llama import causal, target_rows
from eagletwin.reference.mtp import draft_extend, is_provisional, layer_tokens
from eagletwin.reference.sizes import LlamaShape

from .beside import near

# Draft rows and chains, against hand-worked examples.


# The same float64 sums in another order; rows are of size 1 to 10.
SAME = 1e-11


def _request(name: str, length: int, seed: int) -> tuple[Head, Tensor, Tensor]:
    recipe, pair = RECIPES[name], model_pair(name)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, recipe.target.vocab_size, (length,), generator=generator)
    return pair.reference_heads(recipe)[0], tokens, target_rows(pair.reference_target(), recipe.target, tokens).hidden


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


# The EAGLE-3 head by hand, one idea at a time, and what it shares with the chain.


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
    head, tokens = pair.reference_heads(recipe)[0], torch.arange(20, 29)
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


# Multi-layer drafts in the reference: what each row of each layer consumes, and what provisional rows become.


BOTH = pytest.mark.parametrize("name", ["llama-mtp", "llama-mtp-chain"])
X = torch.arange(10, 20)  # x[0..9]: the prompt of ten


@pytest.mark.parametrize(
    ("known", "rows", "expected"),
    [
        # the prompt is over, and x[9] is the token that the target chose: rows 0..8, K = M = 9
        (9, range(6, 9), [[17, 18, 19], [18, 19, 91], [19, 91, 92]]),
        # a chunk of rows 2..4 in the middle: all is known
        (9, range(2, 5), [[13, 14, 15], [14, 15, 16], [15, 16, 17]]),
        # a chunk that ends at 8: the window of layer 2 ends behind the prompt, and its last token is what layer 1 proposed
        (9, range(6, 8), [[17, 18], [18, 19], [19, 92]]),
        # one row, and a window longer than it
        (3, range(2, 3), [[13], [91], [92]]),
    ],
)
def test_row_i_of_layer_k_consumes_token_i_1_k_and_past_what_is_known_the_drafts(
    known: int, rows: range, expected: list[list[int]]
) -> None:
    found = [layer_tokens(X[: known + 1], [91, 92, 93], layer, rows).tolist() for layer in range(3)]
    assert found == expected
    for layer, tokens in enumerate(found):
        assert [token > 90 for token in tokens] == [is_provisional(row, layer, known) for row in rows]


def _model(name: str) -> tuple[tuple, bool, Tensor, Tensor]:  # type: ignore[type-arg]
    recipe, pair = RECIPES[name], model_pair(name)
    tokens = torch.randint(0, 96, (14,), generator=torch.Generator().manual_seed(3))
    hidden = target_rows(pair.reference_target(), recipe.target, tokens).hidden
    return pair.reference_heads(recipe), recipe.chained, tokens, hidden


@BOTH
def test_a_layer_is_the_head_over_its_tokens_and_the_targets_state_or_the_layer_belows(name: str) -> None:
    heads, chained, tokens, hidden = _model(name)
    layers = draft_extend(heads, chained, tokens, hidden, range(9), [None] * 4, [1, 2, 3, 4])  # all is known
    state = hidden[:9]
    for layer, (head, rows) in enumerate(zip(heads, layers, strict=True)):
        by_hand = draft_rows(head, tokens[1 + layer : 10 + layer], state, torch.arange(9), causal(9))
        assert torch.equal(rows.hidden, by_hand.hidden)
        assert torch.equal(rows.keys, by_hand.keys)
        state = by_hand.hidden if chained else state


@BOTH
def test_the_layers_draft_on_from_each_others_proposals(name: str) -> None:
    heads, chained, tokens, hidden = _model(name)
    layers = draft_extend(heads, chained, tokens, hidden, range(13), [None] * 4)
    drafted = [int(layer.logits[-1].argmax()) for layer in layers]
    followed = draft_extend(heads, chained, tokens, hidden, range(13), [None] * 4, drafted)
    assert all(torch.equal(one.logits, other.logits) for one, other in zip(layers, followed, strict=True))
    other = draft_extend(heads, chained, tokens, hidden, range(13), [None] * 4, [(drafted[0] + 1) % 96, *drafted[1:]])
    assert torch.equal(other[0].logits, layers[0].logits)
    assert not torch.equal(other[1].logits[-1], layers[1].logits[-1])  # layer 1 consumed it


@BOTH
def test_rows_in_two_extends_are_the_same_if_all_was_known_and_keep_a_draft_if_it_was_not(name: str) -> None:
    heads, chained, tokens, hidden = _model(name)
    whole = draft_extend(heads, chained, tokens, hidden, range(13), [None] * 4, [5, 6, 7, 8])
    for known, same in ((13, True), (6, False)):  # rows 0..5 when x[0..known] is known, then rows 6..12
        first = draft_extend(heads, chained, tokens[: known + 1], hidden, range(6), [None] * 4, [5, 6, 7, 8])
        second = draft_extend(heads, chained, tokens, hidden, range(6, 13), first, [5, 6, 7, 8])
        for layer in range(4):
            joined = torch.cat([first[layer].keys, second[layer].keys], 1)
            wrong = ((joined - whole[layer].keys).abs().amax((0, 2, 3)) > 1e-9).nonzero().flatten().tolist()
            stale = [] if same else [row for row in range(6) if is_provisional(row, layer, known)]
            if chained and stale:  # what attends to a stale row is off, too, and handed to the layer above
                assert wrong[: len(stale)] == stale
            else:
                assert wrong == stale
    assert isinstance(second[0], DraftRows)


# What transformers drafts with a DeepSeek-V3's own NextN layer, loaded from the checkpoint that SGLang reads.
# `generate(use_mtp=True)` keeps caches of target and layers, drafts a token a layer and verifies them: an outside draft. More
# layers than the recipe's one are copies of it with another projection each, chained as DeepSeek-V3 describes them.


PROMPTS, NEW_TOKENS = 3, 20


def _of_layer(projection: Tensor, layer: int) -> Tensor:
    """eh_proj of a further layer: its rows moved on, so that no two layers are the same."""
    return projection.roll(layer, 0)


def _loaded(name: str, layers: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' model of the target's configuration, from one folder with the weights of all."""
    from transformers import DeepseekV3ForCausalLM

    target, draft = checkpoints(name)
    config = json.loads((target / "config.json").read_bytes()) | {"num_nextn_predict_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    weights, first = load_file(target / "model.safetensors"), RECIPES[name].target.num_layers
    for layer in range(layers):
        for key, tensor in load_file(draft / "model.safetensors").items():
            own = key.replace(f"layers.{first}.", f"layers.{first + layer}.")
            weights[own] = _of_layer(tensor, layer) if "eh_proj" in key else tensor.clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    # its class names the NextN layer of the real model, 61
    added = [rf"model\.layers\.{first + layer}\..*" for layer in range(layers)]
    monkeypatch.setattr(DeepseekV3ForCausalLM, "_keys_to_ignore_on_load_unexpected", added)
    kinds = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.float64, **kinds).eval()


def _rounds(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of each round that is to come: the committed tokens, what is drafted behind them, and its logits."""
    from transformers.generation.candidate_generator import MTPCandidateGenerator

    found: list[tuple[Tensor, Tensor, Tensor]] = []
    drafted = MTPCandidateGenerator.get_candidates

    def noted(self: Any, input_ids: Tensor, *others: Any, **named: Any) -> Any:
        ids, logits = drafted(self, input_ids, *others, **named)
        if logits is not None:
            found.append((input_ids[0].clone(), ids[0, input_ids.shape[1] :].clone(), logits[0].double()))
        return ids, logits

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", noted)
    return found


@pytest.mark.slow  # the import of transformers
@pytest.mark.parametrize(("name", "layers"), [("deepseek-nextn", 1), ("deepseek-nextn-yarn", 1), ("deepseek-nextn", 3)])
def test_each_draft_of_a_generation_is_that_of_transformers(
    name: str, layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, pair = RECIPES[name], model_pair(name)
    weights, head = pair.reference_target(), pair.reference_heads(recipe)[0]
    projections = [_of_layer(head.weights["eh_proj.weight"], layer) for layer in range(layers)]
    heads = [replace(head, weights=head.weights | {"eh_proj.weight": own}) for own in projections]
    model, rounds = _loaded(name, layers, tmp_path, monkeypatch), _rounds(monkeypatch)
    accepted = refused = 0
    for seed in range(PROMPTS):
        prompt = torch.randint(0, 96, (1, 5 + 9 * seed), generator=torch.Generator().manual_seed(seed))
        settings: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        rounds.clear()
        with torch.no_grad():
            [text] = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), use_mtp=True, max_new_tokens=NEW_TOKENS, **settings
            )
        ours = target_rows(weights, recipe.target, text)
        assert ours.logits[prompt.shape[1] - 1 : -1].argmax(-1).tolist() == text[prompt.shape[1] :].tolist()
        for committed, drafts, logits in rounds:
            rows = draft_extend(heads, True, committed, ours.hidden, range(len(committed) - 1), [None] * layers)
            mine = torch.stack([layer.logits[-1] for layer in rows])
            assert mine.argmax(-1).tolist() == drafts.tolist()
            assert near(mine, logits)
            follows = text[len(committed) : len(committed) + 1].tolist()
            accepted, refused = (
                accepted + (follows == drafts[:1].tolist()),
                refused + (follows not in ([], drafts[:1].tolist())),
            )
    assert accepted > 10
    assert refused > 5  # so that both ways of a cache are gone
