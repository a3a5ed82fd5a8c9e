"""Llama with an EAGLE-1/2 head (arXiv 2401.15077, 2406.16858)."""

from dataclasses import replace

from eagletwin.reference.sizes import LlamaShape

from .recipe import Family, Head, Normal, Part, Recipe, Tensor, Weights, attention_weights, gated_weights, llama_shape, noisy

RECIPES = (
    Recipe(
        name="llama-tiny",
        family="llama",
        target=llama_shape(32, 1, 2, 2, 96),
        draft=llama_shape(32, 1, 2, 2, 96),
        intermediate_size=48,
        seed=11,
        noise=0.09,
        attention_gain=0.6,
        mlp_gain=0.6,
        min_share=0.08,
    ),
    Recipe(
        name="llama-gqa",
        family="llama",
        target=llama_shape(64, 2, 4, 2, 128),
        draft=llama_shape(64, 1, 4, 2, 128),
        intermediate_size=96,
        seed=13,
        noise=0.1,
        attention_gain=0.2,
        mlp_gain=0.2,
        min_share=0.05,
    ),
    # heads of 64: FlashInfer's attention has kernels of 64, 128 and 256 alone
    Recipe(
        name="llama-wide",
        family="llama",
        target=replace(llama_shape(64, 2, 4, 2, 128), head_dim=64),
        draft=replace(llama_shape(64, 1, 4, 2, 128), head_dim=64),
        intermediate_size=96,
        seed=19,
        noise=0.1,
        attention_gain=0.2,
        mlp_gain=0.2,
        min_share=0.05,
    ),
)


def llama_layer(recipe: Recipe, shape: LlamaShape, normal: Normal) -> Weights:
    """The tensors of one decoder layer of these sizes, by their names in it."""
    size = shape.hidden_size
    weights = {
        **attention_weights(shape, recipe.attention_gain, normal),
        "post_attention_layernorm.weight": 1 + normal(size, std=0.1),
        **gated_weights("mlp.", size, recipe.intermediate_size, recipe.mlp_gain, normal),
        "input_layernorm.weight": 1 + normal(size, std=0.1),
    }
    if shape.qk_norm:
        weights |= {f"self_attn.{part}_norm.weight": 1 + normal(shape.head_dim, std=0.1) for part in "qk"}
    return weights


def layer_weights(recipe: Recipe, number: int, normal: Normal) -> Weights:  # noqa: ARG001
    return llama_layer(recipe, recipe.target, normal)


def draft_weights(recipe: Recipe, target: Weights, normal: Normal) -> Weights:
    """An EAGLE-1/2 head: the target's last layer with noise, after an fc that takes the embedding."""
    import torch

    last = f"model.layers.{recipe.target.num_layers - 1}."
    draft = {
        f"layers.0.{name.removeprefix(last)}": noisy(recipe, tensor, normal)
        for name, tensor in target.items()
        if name.startswith(last) and "input_layernorm" not in name
    }
    size = recipe.draft.hidden_size
    mixing = torch.cat([torch.eye(size), torch.zeros(size, size)], 1)
    draft["fc.weight"] = mixing + normal(size, 2 * size, std=recipe.noise * size**-0.5)
    draft["fc.bias"] = normal(size, std=0.02)
    return draft


def heads(recipe: Recipe, draft: Weights, embedding: Tensor, lm_head: Tensor, proposes: Tensor) -> tuple[Head, ...]:  # noqa: ARG001
    from eagletwin.reference.eagle import EagleHead

    return (EagleHead(draft, recipe.draft, embedding, lm_head),)


def target_part(recipe: Recipe, target: Weights) -> Part:
    return Part({"architectures": ["LlamaForCausalLM"]}, recipe.target, target)


def checkpoint(recipe: Recipe, target: Weights, draft: Weights) -> tuple[Part, Part]:
    """Both as they are."""
    return target_part(recipe, target), Part({"architectures": ["LlamaForCausalLMEagle"]}, recipe.draft, draft)


def on_vllm(draft: Part) -> Part:
    """vLLM puts "Eagle" before the architecture's name, and its class has no bias."""
    weights = {name: tensor for name, tensor in draft.weights.items() if name != "fc.bias"}
    return replace(draft, config={**draft.config, "architectures": ["LlamaForCausalLM"]}, weights=weights)


FAMILY = Family(
    name="llama",
    recipes=RECIPES,
    draft_weights=draft_weights,
    heads=heads,
    checkpoint=checkpoint,
    one_checkpoint=True,
    vllm_method="eagle",
    on_vllm=on_vllm,
)
