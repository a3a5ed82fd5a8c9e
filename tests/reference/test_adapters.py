"""Adapters of the reference against an outside implementation: transformers' own model, with the adapter beside its maps."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from eagletwin.harness.core.case import Adapter
from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.adapters import made, widened
from eagletwin.harness.families.weights import model_pair
from eagletwin.reference.layers import LowRank, adapted
from eagletwin.reference.llama import target_rows

from .test_llama_against_transformers import _model

ADAPTERS = (Adapter(), Adapter(seed=2, rank=8, on="mlp"), Adapter(seed=4, rank=3, on="attention"))


def exact(model: str, adapter: Adapter) -> dict[str, LowRank]:
    return {name: LowRank(part.down.double(), part.up.double(), part.scale) for name, part in made(model, adapter).items()}


def beside(map_: nn.Module, part: LowRank) -> None:
    """The map's output, and behind it what the adapter adds: two small maps, one after the other."""

    def add(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + part.scale * linear(linear(inputs[0], part.down), part.up)

    map_.register_forward_hook(add)


@pytest.mark.slow  # the import of transformers
@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.on)
@pytest.mark.parametrize("name", ["llama-gqa", "qwen3-eagle3"])
def test_every_row_equals_transformers_own_model_with_the_adapter_beside_it(name: str, adapter: Adapter) -> None:
    parts, model, shape = exact(name, adapter), _model(name), RECIPES[name].target
    tokens = torch.randint(0, shape.vocab_size, (21,), generator=torch.Generator().manual_seed(5))
    for weight, part in parts.items():
        beside(model.get_submodule(weight.removesuffix(".weight")), part)
    with torch.no_grad():
        theirs = model(tokens[None], use_cache=True)
    ours = target_rows(adapted(model_pair(name).reference_target(), parts), shape, tokens)
    pairs = [(ours.logits, theirs.logits[0])]
    for layer in range(shape.num_layers):
        pairs.append((ours.values[layer], theirs.past_key_values.layers[layer].values[0].transpose(0, 1)))
    for mine, other in pairs:
        assert (mine - other).abs().max() <= 1e-6 * other.abs().max()


@pytest.mark.parametrize("name", ["llama-tiny", "llama-eagle3"])
def test_an_adapter_changes_many_of_the_targets_choices(name: str) -> None:
    """Else a row of another adapter could pass for one's own."""
    shape, weights = RECIPES[name].target, model_pair(name).reference_target()
    tokens = torch.randint(0, shape.vocab_size, (64,), generator=torch.Generator().manual_seed(7))
    plain = target_rows(weights, shape, tokens).logits.argmax(-1)
    for adapter in ADAPTERS:
        changed = target_rows(adapted(weights, exact(name, adapter)), shape, tokens).logits.argmax(-1)
        assert float((plain != changed).double().mean()) > 0.05


def test_a_wider_mlp_computes_the_same() -> None:
    parts = made("llama-tiny", Adapter(seed=3, rank=4))
    wide = widened(parts, 64)
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    for name, part in parts.items():
        inputs, outputs = part.down.shape[1], part.up.shape[0]
        given = torch.zeros(5, wide[name].down.shape[1])
        given[:, :inputs] = x[:, :1].expand(-1, inputs) + torch.arange(inputs)
        out = linear(linear(given, wide[name].down), wide[name].up)
        plain = linear(linear(given[:, :inputs], part.down), part.up)
        assert torch.allclose(out[:, :outputs], plain, rtol=1e-5)
        assert not out[:, outputs:].any()
