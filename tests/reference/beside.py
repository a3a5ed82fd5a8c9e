"""transformers' models beside the reference: their sizes, weights of experts, kept states, and how near numbers must be."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.deepseek import latent_config
from eagletwin.harness.families.recipe import Recipe
from eagletwin.harness.families.weights import model_pair
from eagletwin.reference.llama import target_rows
from eagletwin.reference.state_layers import Kept

# Weights of experts as transformers keeps them: of a layer, all in one tensor.


def fused(weights: Mapping[str, Tensor], prefix: str, count: int) -> dict[str, Tensor]:
    """The weights, with the `count` experts of the layer `prefix` in two tensors."""
    own = {name: tensor for name, tensor in weights.items() if not name.startswith(f"{prefix}mlp.experts.")}

    def each(name: str) -> list[Tensor]:
        return [weights[f"{prefix}mlp.experts.{expert}.{name}_proj.weight"] for expert in range(count)]

    own[f"{prefix}mlp.experts.gate_up_proj"] = torch.stack(
        [torch.cat(two) for two in zip(each("gate"), each("up"), strict=True)]
    )
    own[f"{prefix}mlp.experts.down_proj"] = torch.stack(each("down"))
    return own


# What holds of every layer that keeps a state, and of a model with some beside transformers' own.

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


def assert_near(ours: Tensor, theirs: Tensor, close: float) -> None:
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
    assert_near(ours.hidden, theirs.last_hidden_state[0], close)
    assert_near(ours.logits, logits, close)
    layers = theirs.past_key_values.layers
    with_state = [theirs_of[layer] for layer in range(shape.num_layers) if shape.keeps_state(layer)]
    for layer, kept in zip(with_state, ours.kept, strict=True):
        assert_near(kept.state[-1], state_of(layers[layer].recurrent_states[0]), close)
        assert_near(kept.window[-1], layers[layer].conv_states[0][0][:, -kept.window.shape[-1] :], close)
    attends = next(theirs_of[layer] for layer in range(shape.num_layers) if not shape.keeps_state(layer))
    assert_near(ours.keys[0], layers[attends].keys[0].transpose(0, 1), close)
    assert_near(ours.values[0], layers[attends].values[0].transpose(0, 1), close)


# transformers' own DeepSeek-V3 with the sizes of a recipe, and how near its numbers are held to be.

# transformers works out rotary angles, softmax and the router in float32 whatever the dtype: 1e-6 of the largest number is
# what that leaves of a row; the largest difference was 7.2e-7, of a turned key of the last layer
IN_FLOAT32 = 1e-6


def config_of(recipe: Recipe, dense: int = 1) -> Any:
    """transformers' configuration of the target, whose first `dense` layers have no experts."""
    from transformers import DeepseekV3Config

    shape, latent, of_experts = recipe.target, recipe.target.latent, recipe.target.experts
    assert latent is not None
    assert of_experts is not None
    lengthened = latent_config(shape).get("rope_scaling")
    return DeepseekV3Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=recipe.intermediate_size,
        moe_intermediate_size=of_experts.inner,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_heads,
        n_shared_experts=1,
        n_routed_experts=of_experts.count,
        routed_scaling_factor=of_experts.scale,
        kv_lora_rank=latent.rank,
        q_lora_rank=latent.query_rank,
        qk_rope_head_dim=latent.rope,
        qk_nope_head_dim=latent.plain,
        v_head_dim=latent.value,
        n_group=of_experts.groups,
        topk_group=of_experts.kept,
        num_experts_per_tok=of_experts.chosen,
        first_k_dense_replace=dense,
        rms_norm_eps=shape.rms_norm_eps,
        rope_theta=shape.rope_theta,
        rope_scaling=lengthened,
        rope_interleave=True,
        tie_word_embeddings=False,
        attn_implementation="eager",
        experts_implementation="eager",
    )


def half_split(turned: Tensor) -> Tensor:
    """[.., P] of pairs side by side, in the order in which transformers keeps them: first members, then second."""
    return torch.cat([turned[..., 0::2], turned[..., 1::2]], -1)


def near(mine: Tensor, other: Tensor) -> bool:
    """Whether the largest difference is what float32 leaves of the largest number."""
    return bool((mine - other).abs().max() <= IN_FLOAT32 * other.abs().max())
