"""What holds of every layer that keeps a state, and of a model with some beside transformers' own."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.weights import model_pair
from eagletwin.reference.llama import target_rows
from eagletwin.reference.state_layers import Kept

Drawn = Callable[..., Tensor]


def drawn_from(seed: int) -> Drawn:
    generator = torch.Generator().manual_seed(seed)
    return lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64)


def sequences_are_their_own(
    layer: Callable[..., tuple[Tensor, Kept]], weights: Mapping[str, Tensor], shape: Any, inner: Tensor
) -> None:
    """Two sequences side by side are what each of them is alone, and what is kept after a row is a function of its prefix.
    inner [9, H]."""
    together, kept = layer(weights, "", shape, inner, (5, 4), 1e-6)
    for rows in (slice(0, 5), slice(5, 9)):
        alone, own = layer(weights, "", shape, inner[rows], (rows.stop - rows.start,), 1e-6)
        assert torch.allclose(together[rows], alone)
        assert torch.allclose(kept.state[rows], own.state)
        assert torch.allclose(kept.window[rows], own.window)
    prefix = layer(weights, "", shape, inner[:3], (3,), 1e-6)[1]
    assert torch.allclose(prefix.state[2], kept.state[2])
    assert not kept.window[0, :, :2].any()  # before the sequence there is nothing


def near(ours: Tensor, theirs: Tensor, close: float) -> None:
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= close * theirs.abs().max()


def rows_and_what_is_kept_equal(
    model: Any, name: str, count: int, close: float, theirs_of: Sequence[int], state_of: Callable[[Tensor], Tensor]
) -> None:
    """A recipe's target beside transformers' model, for `count` tokens. theirs_of: of each of our layers the one of theirs that
    mixes its rows; state_of: their state [1, ..] as ours [N, W, D]."""
    shape = RECIPES[name].target
    tokens = torch.randint(0, shape.vocab_size, (count,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        theirs = model.model(tokens[None], use_cache=True)
        logits = model.lm_head(theirs.last_hidden_state)[0]
    ours = target_rows(model_pair(name).reference_target(), shape, tokens)
    near(ours.hidden, theirs.last_hidden_state[0], close)
    near(ours.logits, logits, close)
    layers = theirs.past_key_values.layers
    with_state = [theirs_of[layer] for layer in range(shape.num_layers) if shape.keeps_state(layer)]
    for layer, kept in zip(with_state, ours.kept, strict=True):
        near(kept.state[-1], state_of(layers[layer].recurrent_states[0]), close)
        near(kept.window[-1], layers[layer].conv_states[0][0][:, -kept.window.shape[-1] :], close)
    attends = next(theirs_of[layer] for layer in range(shape.num_layers) if not shape.keeps_state(layer))
    near(ours.keys[0], layers[attends].keys[0].transpose(0, 1), close)
    near(ours.values[0], layers[attends].values[0].transpose(0, 1), close)
