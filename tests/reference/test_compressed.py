"""DeepSeek-V4's arithmetic, against transformers' model, which knows no FP8; and compressed rows against a naive sum."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.weights import model_pair
from eagletwin.reference import compressed
from eagletwin.reference.compressed import compress, read_stored, sizes_of, turn
from eagletwin.reference.layers import round_to_fp8
from eagletwin.reference.llama import causal, target_rows
from eagletwin.reference.rows import Standing

NAME = "deepseek-v4"
SHAPE = RECIPES[NAME].target
SIZES = sizes_of(SHAPE)
# transformers computes norms, angles and weights of streams in float32, whatever the model's type
FLOAT32 = 1e-5


def _theirs(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The target's weights by transformers' names."""
    found, experts = {}, SHAPE.experts
    assert experts is not None
    for name, tensor in weights.items():
        if ".mlp.experts." in name:
            continue
        for ours, theirs in (
            ("self_attn.q_a_layernorm", "self_attn.q_a_norm"),
            ("self_attn.indexer.compressor.", "self_attn.compressor.indexer."),
            ("self_attn.indexer.weights_proj", "self_attn.compressor.indexer.scorer.weights_proj"),
            ("self_attn.indexer.", "self_attn.compressor.indexer."),
            ("hc_head.", "hc_head.hc_"),
        ):
            name = name.replace(ours, theirs)
        found[name] = tensor.long() if name.endswith("tid2eid") else tensor
    for layer in range(SHAPE.num_layers):
        prefix = f"model.layers.{layer}.mlp.experts."
        of_each = [
            [weights[f"{prefix}{n}.{part}.weight"] for n in range(experts.count)]
            for part in ("gate_proj", "up_proj", "down_proj")
        ]
        gate, up, down = (torch.stack(part) for part in of_each)
        found |= {f"{prefix}gate_up_proj": torch.cat([gate, up], 1), f"{prefix}down_proj": down}
    return found


@pytest.mark.slow  # the import of transformers
def test_the_target_equals_transformers_deepseek_v4_but_for_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    experts = SHAPE.experts
    assert experts is not None
    scaling = {
        "rope_type": "yarn",
        "factor": SIZES.scaling.factor,
        "original_max_position_embeddings": SIZES.scaling.original,
        "beta_fast": SIZES.scaling.often,
        "beta_slow": SIZES.scaling.seldom,
    }
    config = DeepseekV4Config(
        vocab_size=SHAPE.vocab_size,
        hidden_size=SHAPE.hidden_size,
        moe_intermediate_size=experts.inner,
        num_hidden_layers=SHAPE.num_layers,
        num_attention_heads=SHAPE.num_heads,
        q_lora_rank=SIZES.query_rank,
        qk_rope_head_dim=SIZES.rope,
        num_experts_per_tok=experts.chosen,
        n_routed_experts=experts.count,
        routed_scaling_factor=experts.scale,
        scoring_func="sqrtsoftplus",
        max_position_embeddings=4096,
        rope_parameters=scaling,
        compress_ratios=list(SIZES.ratios),
        num_hash_layers=1,
        o_groups=SIZES.groups,
        o_lora_rank=SIZES.group_rank,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    weights = model_pair(NAME).reference_target()
    model = DeepseekV4ForCausalLM(config).double().eval()
    model.load_state_dict(_theirs(weights))
    tokens = torch.randint(0, SHAPE.vocab_size, (139,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        theirs = model(tokens[None], use_cache=False).logits[0]
    rounded = target_rows(weights, SHAPE, tokens)
    monkeypatch.setattr(compressed, "read_stored", lambda rows, plain: rows)
    ours = target_rows(weights, SHAPE, tokens)
    assert (ours.logits - theirs).abs().max() < FLOAT32 * theirs.abs().max()
    off = (rounded.logits - ours.logits).abs().max() / ours.logits.abs().max()
    assert 1e-3 < off < 0.05  # what FP8 takes off


@pytest.mark.parametrize("ratio", [4, 128])
def test_a_compressed_row_is_a_sum_of_its_rows_channel_by_channel(ratio: int) -> None:
    layer = SIZES.ratios.index(ratio)
    prefix, length = f"model.layers.{layer}.self_attn.compressor.", 2 * ratio + 3
    weights = model_pair(NAME).reference_target()
    inner = torch.randn(length + 5, SHAPE.hidden_size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = compress(weights, prefix, SHAPE, ratio, inner, [5, length])
    vector, score = (inner[5:] @ weights[f"{prefix}{name}.weight"].T for name in ("kv_proj", "gate_proj"))
    bias, norm, width = weights[f"{prefix}position_bias"], weights[f"{prefix}kv_norm.weight"], SHAPE.head_dim
    first = 1 if ratio == 4 else 0  # of the five rows that stand before, four end a group
    assert torch.equal(found.ends, torch.tensor([3] * first + [5 + ratio - 1, 5 + 2 * ratio - 1]))
    for group in range(2):
        for channel in (0, 7, width - 65):  # of the part that does not turn
            terms = []
            for place in range(ratio):
                row = group * ratio + place
                own = channel + width if ratio == 4 else channel
                terms.append((float(score[row, own] + bias[place, own]), float(vector[row, own])))
                if ratio == 4 and group:
                    before = row - ratio
                    terms.append((float(score[before, channel] + bias[place, channel]), float(vector[before, channel])))
            total = sum(math.exp(weight) for weight, _ in terms)
            naive = sum(math.exp(weight) * value for weight, value in terms) / total
            row = found.rows[first + group]
            back = turn(SIZES, row[None, None], torch.tensor([group * ratio]), ratio, back=True)[0, 0] / norm
            size = float(back[channel]) / naive  # the norm divides all channels alike
            if channel == 0:
                expected = size
            assert size == pytest.approx(expected)
    assert torch.allclose(found.kept[5:], torch.cat([vector, score], -1))


def test_stored_rows_are_read_in_blocks_of_64_and_the_turned_part_in_bfloat16() -> None:
    row = torch.randn(3, 512, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    row[0, 64:128] *= 1e3
    read = read_stored(row, 448)
    assert torch.equal(read[:, 448:], row[:, 448:].bfloat16().double())
    for begin in range(0, 448, 64):
        assert torch.equal(read[:, begin : begin + 64], round_to_fp8(row[:, begin : begin + 64])[0])
    assert ((read[:, :448] - row[:, :448]).abs() <= row[:, :448].abs() / 16 + 1e-5 * row.abs().max()).all()


def test_a_turn_back_undoes_a_turn() -> None:
    rows = torch.randn(5, 2, 512, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    at = torch.tensor([0, 1, 7, 130, 300])
    for ratio in (0, 4):
        turned = turn(SIZES, rows, at, ratio)
        assert not torch.allclose(turned[1:], rows[1:])
        assert torch.allclose(turn(SIZES, turned, at, ratio, back=True), rows)
    assert not torch.allclose(turn(SIZES, rows, at, 0), turn(SIZES, rows, at, 4))


def test_a_text_in_which_rows_would_be_left_out_is_refused() -> None:
    weights, layer = model_pair(NAME).reference_target(), 0
    inner = torch.randn(16, SHAPE.hidden_size, dtype=torch.float64)
    few = replace(SHAPE, compressed=replace(SIZES, chosen=3))
    with pytest.raises(ValueError, match="more compressed rows"):
        compressed.attention(
            weights, f"model.layers.{layer}.self_attn.", few, 4, inner, Standing(torch.arange(16), causal(16), [16])
        )
