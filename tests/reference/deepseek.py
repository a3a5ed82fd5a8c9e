"""transformers' own DeepSeek-V3 with the sizes of a recipe, and how near its numbers are held to be."""

from typing import Any

import torch
from torch import Tensor

from eagletwin.harness.families.deepseek import latent_config
from eagletwin.harness.families.recipe import Recipe

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
