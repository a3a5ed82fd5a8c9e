"""Llama with a small language model of its own as draft: SGLang's STANDALONE.

The draft is whole: embedding, layers, final norm and LM head are its own, and it takes nothing of the target but the tokens.
Here each of its tensors is the target's with noise. The first token weighs: it is in the sight of every row, and an engine that
leaves it out of the draft is one row short from the start.
"""

from .llama import target_part
from .recipe import Family, Head, Normal, Part, Recipe, Tensor, Weights, llama_shape, noisy

RECIPES = (
    Recipe(
        name="llama-standalone",
        family="llama_standalone",
        target=llama_shape(32, 1, 2, 2, 96),
        draft=llama_shape(32, 1, 2, 2, 96),
        intermediate_size=48,
        seed=87,
        noise=0.12,
        attention_gain=0.6,
        mlp_gain=0.6,
        target_hidden="none",
        min_share=0.06,
    ),
)


def draft_weights(recipe: Recipe, target: Weights, normal: Normal) -> Weights:
    """A whole Llama: the target's, with noise."""
    layers = [f"model.layers.{layer}." for layer in range(recipe.draft.num_layers)]
    return {
        name: noisy(recipe, tensor, normal)
        for name, tensor in target.items()
        if not name.startswith("model.layers.") or name.startswith(tuple(layers))
    }


def heads(recipe: Recipe, draft: Weights, embedding: Tensor, lm_head: Tensor, proposes: Tensor) -> tuple[Head, ...]:  # noqa: ARG001
    """The one model, as it was trained: row i consumes x[i]."""
    from eagletwin.reference.draft_heads import PlainDraft

    return (PlainDraft(draft, recipe.draft),)


def checkpoint(recipe: Recipe, target: Weights, draft: Weights) -> tuple[Part, Part]:
    """Two plain Llamas."""
    return target_part(recipe, target), Part({"architectures": ["LlamaForCausalLM"]}, recipe.draft, draft)


FAMILY = Family(name="llama_standalone", recipes=RECIPES, draft_weights=draft_weights, heads=heads, checkpoint=checkpoint)
