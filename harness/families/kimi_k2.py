"""Kimi K2 with an EAGLE-3 head of latent attention: the target is a DeepSeek-V3 without groups of experts.

SGLang's own classes serve both. The head is that of eagle3.py in all but its attention, which makes a latent row of the token's
embedding and the state side by side. Conventions, with their outside sources, are in docs/explanation/latent-attention.md.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from eagletwin.reference.sizes import ExpertShape, LatentShape, LlamaShape

from . import deepseek, eagle3
from .recipe import Family, Normal, Part, Recipe, Tensor, Weights, llama_shape, noisy

# Queries are made of a latent vector that has room for an embedding and a state, which a head's queries are to hold.
_LATENT = LatentShape(query_rank=128, rank=512, rope=64, plain=32, value=32)
_EXPERTS = ExpertShape(count=4, chosen=2, inner=32, affinity="sigmoid", shared=True, scale=1.5)


def _shape(num_layers: int, aux_layers: tuple[int, ...] = ()) -> LlamaShape:
    plain = llama_shape(64, num_layers, 2, 1, 96, aux_layers)
    return replace(plain, head_dim=_LATENT.width, latent=_LATENT, experts=_EXPERTS)


def _recipe(name: str, seed: int, min_share: float, **others: Any) -> Recipe:
    return Recipe(
        name=name,
        family="kimi_k2",
        target=_shape(4, (1, 2)),
        draft=replace(_shape(1), experts=None),
        intermediate_size=96,
        seed=seed,
        noise=0.05,
        attention_gain=0.08,
        mlp_gain=0.06,
        target_hidden="aux",
        min_share=min_share,
        **others,
    )


RECIPES = (
    _recipe("kimi-k2-eagle3", 135, 0.05),
    _recipe("kimi-k2-eagle3.1", 163, 0.04, draft_vocab_size=64, head_norms=("fc_norm", "norm_output")),
)

# Scores of a row with itself of SELF**2 * 32 / 96**0.5 = 13, as those of eagle3.py
_SELF = 2.0
# Of turned parts SELF**2 * 64 / 96**0.5 = 4: of rows of the same token, a row attends to those of the same state.
_SELF_TURNED = 0.8


def draft_weights(recipe: Recipe, target: Weights, normal: Normal) -> Weights:
    """The head of eagle3.py with latent attention that gives the same: mostly a row's own token."""
    size, last = recipe.draft.hidden_size, f"model.layers.{recipe.target.num_layers - 1}."
    names = ("gate_proj", "up_proj", "down_proj")
    shared = {f"{last}mlp.{name}.weight": target[f"{last}mlp.shared_experts.{name}.weight"] for name in names}
    plain = replace(recipe, draft=llama_shape(size, 1, size // 16, size // 16, recipe.target.vocab_size))
    draft = eagle3.draft_weights(plain, target | shared, normal)
    for name in ("q", "k", "v", "o"):
        del draft[f"midlayer.self_attn.{name}_proj.weight"]
    return draft | {f"midlayer.self_attn.{name}": tensor for name, tensor in _attention(recipe, normal).items()}


def _attention(recipe: Recipe, normal: Normal) -> Weights:
    """Of a row's input [token, state], 2H wide, the latent vector holds all, several times over, in other orders and signs.

    Each head's plain query and key are its share of the token's embedding, and its turned ones the state; its value is its
    share of the embedding less most of the state. Heads together are as wide as the state. No matrices are multiplied: the last
    bits of a product depend on the number of threads.
    """
    import torch

    size, heads = recipe.draft.hidden_size, recipe.draft.num_heads
    copies = _LATENT.rank // (2 * size)

    with_noise = partial(noisy, recipe, normal=normal)

    def by_head(first: Tensor, second: Tensor) -> Tensor:
        return torch.cat([torch.cat(pair) for pair in zip(first.chunk(heads), second.chunk(heads), strict=True)])

    def signed_permutation(width: int) -> Tensor:
        return torch.eye(width)[normal(width, std=1.0).argsort()] * normal(width, 1, std=1.0).sign()

    of_query = signed_permutation(2 * size)
    mixed = torch.cat([signed_permutation(2 * size) for _ in range(copies)])  # [rank, 2H]
    asks_token, asks_state = of_query.T.chunk(2)  # [H, 2H]: what makes them of a latent vector again
    token, state = (mixed.T / copies).chunk(2)  # [H, rank]
    context = normal(size, _LATENT.rank, std=eagle3.CONTEXT * _LATENT.rank**-0.5)
    turned = torch.cat([torch.zeros(size, size), _SELF_TURNED * torch.eye(size)], 1)
    return {
        "q_a_proj.weight": with_noise(of_query),
        "q_a_layernorm.weight": 1 + normal(_LATENT.query_rank, std=recipe.noise),
        "q_b_proj.weight": by_head(with_noise(_SELF * asks_token), with_noise(torch.cat([_SELF_TURNED * asks_state] * heads))),
        "kv_a_proj_with_mqa.weight": torch.cat([with_noise(mixed), with_noise(turned)]),
        "kv_a_layernorm.weight": 1 + normal(_LATENT.rank, std=recipe.noise),
        "kv_b_proj.weight": by_head(with_noise(_SELF * token), token + (eagle3.CONTEXT - 1) * state + context),
        "o_proj.weight": with_noise(torch.eye(size)),
    }


def checkpoint(recipe: Recipe, target: Weights, draft: Weights) -> tuple[Part, Part]:
    """Both as they are: the target's configuration is DeepSeek-V3's, as Kimi K2's names its class."""
    config = {
        **deepseek.target_config(recipe.target),
        **eagle3.draft_part(recipe, draft).config,
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "intermediate_size": _EXPERTS.inner,
    }
    return Part(deepseek.target_config(recipe.target), recipe.target, target), Part(config, recipe.draft, draft)


FAMILY = Family(
    name="kimi_k2",
    recipes=RECIPES,
    draft_weights=draft_weights,
    heads=eagle3.heads,
    checkpoint=checkpoint,
    layer_weights=deepseek.layer_weights,
    modules=("sglang.srt.models.deepseek_v2", "sglang.srt.models.kimi_k25_eagle3"),
    stored="latent rows",
    dp_attention=True,
    limits=("a context as trained", "no FP8", "routed and shared experts are not fused"),
)
