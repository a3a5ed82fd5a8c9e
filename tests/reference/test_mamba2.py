"""Layers that keep a state of Mamba-2, heads that do not turn, experts without a gate: against transformers' own Nemotron-H."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from eagletwin.harness.families import RECIPES, family_of
from eagletwin.harness.families.weights import model_pair
from eagletwin.reference.eagle import draft_rows
from eagletwin.reference.llama import causal
from eagletwin.reference.sizes import ScanShape
from eagletwin.reference.state_layers import scan_layer, scan_step

from .kept import drawn_from, near, rows_and_what_is_kept_equal, sequences_are_their_own

RECIPE = RECIPES["nemotron-h-nextn"]
# transformers works out norms, decays, steps and the router in float32 whatever the dtype: 1e-6 of the largest number is what
# that leaves
CLOSE = 1e-6


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


def test_a_sequence_is_its_own_and_begins_from_nothing() -> None:
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
    assert RECIPE.target.experts is not None
    layers = dict.fromkeys(name.partition(".experts.")[0] for name in weights if ".experts." in name)
    for layer in layers:
        for part in ("up_proj", "down_proj"):
            each = [weights[f"{layer}.experts.{n}.{part}.weight"].double() for n in range(RECIPE.target.experts.count)]
            found[f"{layer}.experts.{part}"] = torch.stack(each)
    return found


def _model() -> Any:
    """transformers' own Nemotron-H with the recipe's checkpoint, which SGLang reads too."""
    import transformers

    shape, pair = RECIPE.target, model_pair(RECIPE.name)
    part, _ = family_of(RECIPE).checkpoint(RECIPE, pair.target, pair.draft)
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
def test_every_row_and_what_is_kept_equal_transformers_own_model_in_float64() -> None:
    each_is_two = range(0, 2 * RECIPE.target.num_layers, 2)  # of theirs
    rows_and_what_is_kept_equal(_model(), RECIPE.name, 50, CLOSE, each_is_two, lambda state: state[0])  # four of its chunks


@pytest.mark.slow
def test_the_mtp_layer_is_two_layers_of_transformers_behind_its_projection() -> None:
    """transformers has no such head. Its parts are the target's: norms, a layer that attends, and one of experts."""
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHRMSNorm

    model, pair, head = _model(), model_pair(RECIPE.name), model_pair(RECIPE.name).reference_head(RECIPE)
    _, part = family_of(RECIPE).checkpoint(RECIPE, pair.target, pair.draft)
    served = _experts_together({name.removeprefix("mtp."): tensor for name, tensor in part.weights.items()})
    beside = ("enorm", "hnorm", "eh_proj", "final_layernorm")
    for number, layer in enumerate(model.model.layers[-2:]):
        own = {name.removeprefix(f"layers.{number}."): one for name, one in served.items() if f"layers.{number}." in name}
        layer.load_state_dict({name: one for name, one in own.items() if not name.startswith(beside)})

    def normed(name: str, x: Tensor) -> Tensor:
        norm = NemotronHRMSNorm(x.shape[-1], RECIPE.draft.rms_norm_eps).double()
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
    near(ours.hidden, theirs, CLOSE)
    near(ours.logits, theirs @ pair.target["lm_head.weight"].double().T, CLOSE)
