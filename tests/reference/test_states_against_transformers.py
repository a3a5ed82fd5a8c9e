"""Layers that keep a state, against transformers' own Qwen3-Next, Nemotron-H and Qwen3.5."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from eagletwin.harness.families import RECIPES, family_of
from eagletwin.harness.families.weights import model_pair
from eagletwin.reference.eagle import draft_rows
from eagletwin.reference.llama import causal
from eagletwin.reference.sizes import DeltaShape, ScanShape
from eagletwin.reference.state_layers import delta_layer, delta_step, scan_layer, scan_step, unit

from .beside import assert_near, drawn_from, fused, rows_and_what_is_kept_equal, sequences_are_their_own

# Layers that keep a state, gated attention and the MTP layer: against transformers' own Qwen3-Next, and by hand.


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

    model, pair, head = _model(), model_pair(RECIPE.name), model_pair(RECIPE.name).reference_heads(RECIPE)[0]
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
    assert_near(ours.hidden, theirs, CLOSE)
    assert_near(ours.logits, theirs @ pair.target["lm_head.weight"].double().T, CLOSE)


# Layers that keep a state of Mamba-2, heads that do not turn, experts without a gate: against transformers' own Nemotron-H.


MAMBA2_RECIPE = RECIPES["nemotron-h-nextn"]
# transformers works out norms, decays, steps and the router in float32 whatever the dtype: 1e-6 of the largest number is what
# that leaves
MAMBA2_CLOSE = 1e-6


def test_a_step_lets_the_state_decay_and_adds_the_input_along_its_direction() -> None:
    """One head of width 2 with a state of 2: what is read along a direction is what was put there, less its decay."""
    one, along, across = torch.ones(1).double(), torch.tensor([[1.0, 0.0]]).double(), torch.tensor([[0.0, 1.0]]).double()
    state = scan_step(torch.zeros(1, 2, 2).double(), 0 * one, 0.5 * one, torch.tensor([[6.0, 10.0]]).double(), along)
    assert torch.equal(state @ along[0], torch.tensor([[3.0, 5.0]]).double())  # a step of one half
    assert not (state @ across[0]).any()
    state = scan_step(state, 0.25 * one, one, torch.tensor([[7.0, 9.0]]).double(), across)
    assert torch.equal(state @ along[0], torch.tensor([[0.75, 1.25]]).double())
    assert torch.equal(state @ across[0], torch.tensor([[7.0, 9.0]]).double())
    again = scan_step(
        state, one, one, torch.tensor([[1.0, 1.0]]).double(), across
    )  # unlike the delta rule it takes nothing out
    assert torch.equal(again @ across[0], torch.tensor([[8.0, 10.0]]).double())


def test_a_sequence_is_its_own_and_begins_from_nothing_in_mamba2() -> None:
    shape = ScanShape(heads=4, width=3, groups=2, state=5, kernel=4)
    drawn = drawn_from(1)
    sizes = {"in_proj_gate": (12, 5), "in_proj_mixed": (shape.mixed, 5), "in_proj_step": (4, 5), "out_proj": (5, 12)}
    weights = {f"{name}.weight": drawn(*size) for name, size in sizes.items()}
    weights |= {"conv1d.weight": drawn(shape.mixed, 4), "conv1d.bias": drawn(shape.mixed), "norm.weight": drawn(12)}
    weights |= {name: drawn(4) for name in ("A_log", "D", "step_bias")}
    sequences_are_their_own(scan_layer, weights, shape, drawn(9, 5))


def _experts_together(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights as transformers keeps them: of a layer, all experts in one tensor."""
    found = {name: tensor.double() for name, tensor in weights.items() if ".experts." not in name}
    assert MAMBA2_RECIPE.target.experts is not None
    layers = dict.fromkeys(name.partition(".experts.")[0] for name in weights if ".experts." in name)
    for layer in layers:
        for part in ("up_proj", "down_proj"):
            each = [weights[f"{layer}.experts.{n}.{part}.weight"].double() for n in range(MAMBA2_RECIPE.target.experts.count)]
            found[f"{layer}.experts.{part}"] = torch.stack(each)
    return found


def _mamba2_model() -> Any:
    """transformers' own Nemotron-H with the recipe's checkpoint, which SGLang reads too."""
    import transformers

    shape, pair = MAMBA2_RECIPE.target, model_pair(MAMBA2_RECIPE.name)
    part, _ = family_of(MAMBA2_RECIPE).checkpoint(MAMBA2_RECIPE, pair.target, pair.draft)
    own = {name: value for name, value in part.config.items() if name not in ("architectures", "model_type", "n_groups")}
    config = transformers.NemotronHConfig(
        **own,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        time_step_min=1e-30,  # transformers alone clamps steps from below
        tie_word_embeddings=False,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    model = transformers.NemotronHForCausalLM(config).double().eval()
    renamed = {name.replace("backbone.", "model."): tensor for name, tensor in part.weights.items()}
    model.load_state_dict(_experts_together(renamed))
    return model


@pytest.mark.slow  # the import of transformers
def test_every_row_and_what_is_kept_equal_transformers_own_model_in_float64_in_mamba2() -> None:
    each_is_two = range(0, 2 * MAMBA2_RECIPE.target.num_layers, 2)  # of theirs
    rows_and_what_is_kept_equal(
        _mamba2_model(), MAMBA2_RECIPE.name, 50, MAMBA2_CLOSE, each_is_two, lambda state: state[0]
    )  # four of its chunks


@pytest.mark.slow
def test_the_mtp_layer_is_two_layers_of_transformers_behind_its_projection() -> None:
    """transformers has no such head. Its parts are the target's: norms, a layer that attends, and one of experts."""
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHRMSNorm

    model, pair, head = (
        _mamba2_model(),
        model_pair(MAMBA2_RECIPE.name),
        model_pair(MAMBA2_RECIPE.name).reference_heads(MAMBA2_RECIPE)[0],
    )
    _, part = family_of(MAMBA2_RECIPE).checkpoint(MAMBA2_RECIPE, pair.target, pair.draft)
    served = _experts_together({name.removeprefix("mtp."): tensor for name, tensor in part.weights.items()})
    beside = ("enorm", "hnorm", "eh_proj", "final_layernorm")
    for number, layer in enumerate(model.model.layers[-2:]):
        own = {name.removeprefix(f"layers.{number}."): one for name, one in served.items() if f"layers.{number}." in name}
        layer.load_state_dict({name: one for name, one in own.items() if not name.startswith(beside)})

    def normed(name: str, x: Tensor) -> Tensor:
        norm = NemotronHRMSNorm(x.shape[-1], MAMBA2_RECIPE.draft.rms_norm_eps).double()
        norm.load_state_dict({"weight": served[f"layers.{name}.weight"]})
        return norm(x)

    tokens, positions = torch.arange(3, 24), torch.arange(21)
    hidden = torch.randn(21, 32, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    ours = draft_rows(head, tokens, hidden, positions, causal(21))
    with torch.no_grad():
        embedded = normed("0.enorm", model.model.embeddings(tokens))
        x = (torch.cat([embedded, normed("0.hnorm", hidden)], -1) @ served["layers.0.eh_proj.weight"].T)[None]
        mask = torch.where(causal(21), 0.0, -torch.inf).double()[None, None]
        for layer in model.model.layers[-2:]:
            x = layer(x, attention_mask=mask)
        theirs = normed("1.final_layernorm", x.view(21, -1))
    assert_near(ours.hidden, theirs, MAMBA2_CLOSE)
    assert_near(ours.logits, theirs @ pair.target["lm_head.weight"].double().T, MAMBA2_CLOSE)


# Qwen3.5's layers and its MTP layer, against transformers' own model of text alone.


QWEN3_5_RECIPE = RECIPES["qwen3.5-nextn"]
# what transformers keeps in float32 whatever the dtype leaves this share of the largest number
QWEN3_5_CLOSE = 1e-6


def _qwen3_5_model() -> Any:
    """transformers' own Qwen3.5 with the recipe's checkpoint, which SGLang reads too."""
    import transformers

    shape, pair = QWEN3_5_RECIPE.target, model_pair(QWEN3_5_RECIPE.name)
    part, _ = family_of(QWEN3_5_RECIPE).checkpoint(QWEN3_5_RECIPE, pair.target, pair.draft)
    left_out = ("architectures", "model_type", "partial_rotary_factor", "full_attention_interval")
    config = transformers.Qwen3_5TextConfig(
        **{name: value for name, value in part.config.items() if name not in left_out},
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=QWEN3_5_RECIPE.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_norm_eps,
        layer_types=[("full_attention", "linear_attention")[shape.keeps_state(n)] for n in range(shape.num_layers)],
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    model = transformers.Qwen3_5ForCausalLM(config).double().eval()
    model.load_state_dict({name: tensor.double() for name, tensor in part.weights.items()})
    return model


@pytest.mark.slow  # the import of transformers
def test_every_row_and_what_is_kept_equal_transformers_own_model_in_float64_in_qwen3_5() -> None:
    layers = range(QWEN3_5_RECIPE.target.num_layers)  # three of its chunks; [N, D, W] there
    rows_and_what_is_kept_equal(_qwen3_5_model(), QWEN3_5_RECIPE.name, 150, QWEN3_5_CLOSE, layers, lambda state: state[0].mT)


@pytest.mark.slow
def test_the_mtp_layer_is_a_layer_of_transformers_behind_its_projection_in_qwen3_5() -> None:
    """transformers has no such head. Its parts are the target's: norms, and a layer that attends."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm

    model, pair, head = (
        _qwen3_5_model(),
        model_pair(QWEN3_5_RECIPE.name),
        model_pair(QWEN3_5_RECIPE.name).reference_heads(QWEN3_5_RECIPE)[0],
    )
    _, part = family_of(QWEN3_5_RECIPE).checkpoint(QWEN3_5_RECIPE, pair.target, pair.draft)
    served = {name.removeprefix("mtp."): tensor.double() for name, tensor in part.weights.items()}
    layer, own = model.model.layers[-1], "layers.0."
    layer.load_state_dict({name.removeprefix(own): tensor for name, tensor in served.items() if name.startswith(own)})

    def normed(name: str, x: Tensor) -> Tensor:
        norm = Qwen3_5RMSNorm(x.shape[-1], QWEN3_5_RECIPE.draft.rms_norm_eps).double()
        norm.load_state_dict({"weight": served[f"{name}.weight"]})
        return norm(x)

    tokens, positions = torch.arange(3, 24), torch.arange(21)
    hidden = torch.randn(21, 32, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    ours = draft_rows(head, tokens, hidden, positions, causal(21))
    with torch.no_grad():
        embedded = normed("pre_fc_norm_embedding", model.model.embed_tokens(tokens))
        x = torch.cat([embedded, normed("pre_fc_norm_hidden", hidden)], -1) @ served["fc.weight"].T
        turns = model.model.rotary_emb(x[None], positions[None, None].expand(3, 1, -1))
        mask = torch.where(causal(21), 0.0, -torch.inf).double()[None, None]
        out = layer(x[None], position_embeddings=turns, attention_mask=mask)
        theirs = normed("norm", (out[0] if isinstance(out, tuple) else out).view(21, -1))
    assert_near(ours.hidden, theirs, QWEN3_5_CLOSE)
    assert_near(ours.logits, theirs @ pair.target["lm_head.weight"].double().T, QWEN3_5_CLOSE)
