"""Llama with a multi-layer draft (MTP): one EAGLE-1/2 head a layer, which the engine's boot/served/llama.py serves.

Its tensors carry the number of their layer, `model.mtp.layers.{n}.`: SGLang's loader gives each runner its own layer by it.
"""

from collections.abc import Callable
from dataclasses import replace

from . import llama
from .recipe import Family, Head, Normal, Part, Recipe, Tensor, Weights, llama_shape, noisy

PREFIX = "model.mtp.layers.{}."

_PLAIN = Recipe(
    name="llama-mtp",
    family="llama_mtp",
    target=llama_shape(32, 1, 2, 2, 96),
    draft=llama_shape(32, 1, 2, 2, 96),
    intermediate_size=48,
    seed=61,
    noise=0.09,
    attention_gain=0.6,
    mlp_gain=0.6,
    min_share=0.05,
    mtp_layers=4,
)
RECIPES = (_PLAIN, replace(_PLAIN, name="llama-mtp-chain", seed=62, chained=True))


def layers_of(recipe: Recipe, one: Callable[[], Weights]) -> Weights:
    """A draft of all layers, each made by `one`."""
    layers = [one() for _ in range(recipe.mtp_layers)]
    return {PREFIX.format(n) + name: tensor for n, layer in enumerate(layers) for name, tensor in layer.items()}


def layer_numbers(draft: Weights) -> list[int]:
    """The layers that a draft has tensors of, in rising order."""
    begin = PREFIX.partition("{")[0]
    return sorted({int(name.removeprefix(begin).partition(".")[0]) for name in draft if name.startswith(begin)})


def layer_of(draft: Weights, layer: int) -> Weights:
    """One layer of the draft, by the names of its head."""
    prefix = PREFIX.format(layer)
    return {name.removeprefix(prefix): tensor for name, tensor in draft.items() if name.startswith(prefix)}


def joined_layer(recipe: Recipe, target: Weights, normal: Normal) -> Weights:
    """A layer of MtpHead: the target's last layer and final norm with noise, after a projection that takes the embedding."""
    import torch

    last, size = f"model.layers.{recipe.target.num_layers - 1}.", recipe.draft.hidden_size
    of_layer = {name.removeprefix(last): tensor for name, tensor in target.items() if name.startswith(last)}
    draft = {f"layers.0.{name}": noisy(recipe, tensor, normal) for name, tensor in of_layer.items()}
    draft |= {name: 1 + normal(size, std=recipe.noise) for name in ("enorm.weight", "hnorm.weight")}
    mixing = torch.cat([torch.eye(size), torch.zeros(size, size)], 1)
    draft["eh_proj.weight"] = mixing + normal(size, 2 * size, std=recipe.noise * size**-0.5)
    draft["norm.weight"] = noisy(recipe, target["model.norm.weight"], normal)
    return draft


def joined_head(recipe: Recipe, draft: Weights, embedding: Tensor, lm_head: Tensor, proposes: Tensor) -> tuple[Head, ...]:  # noqa: ARG001
    """The one layer, which hands on its normed state."""
    from eagletwin.reference.draft_heads import MtpHead

    return (MtpHead(draft, recipe.draft, embedding, lm_head, normed=True),)


def draft_weights(recipe: Recipe, target: Weights, normal: Normal) -> Weights:
    """Layers that differ from each other by their noise."""
    return layers_of(recipe, lambda: llama.draft_weights(recipe, target, normal))


def heads(recipe: Recipe, draft: Weights, embedding: Tensor, lm_head: Tensor, proposes: Tensor) -> tuple[Head, ...]:  # noqa: ARG001
    """An EAGLE-1/2 head a layer."""
    from eagletwin.reference.eagle import EagleHead

    return tuple(EagleHead(layer_of(draft, n), recipe.draft, embedding, lm_head) for n in range(recipe.mtp_layers))


def checkpoint(recipe: Recipe, target: Weights, draft: Weights) -> tuple[Part, Part]:
    """Both as they are. SGLang knows models whose layers are chained by a list of names, and serves each name specially."""
    architecture = "Step3p5MTP" if recipe.chained else "LlamaForCausalLMMTP"
    return llama.target_part(recipe, target), Part({"architectures": [architecture]}, recipe.draft, draft)


FAMILY = Family(
    name="llama_mtp",
    recipes=RECIPES,
    draft_weights=draft_weights,
    heads=heads,
    checkpoint=checkpoint,
    # a chained Llama has the name of a model with windows, but not its memory (boot/served/llama.py)
    arguments=lambda recipe: {"disable_hybrid_swa_memory": recipe.chained},
)
