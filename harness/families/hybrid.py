"""What families have in common whose layers keep a state, but for one in so many, which attends."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from .recipe import Normal, Recipe, Weights

    Part = Callable[[Recipe, Normal], Weights]

# Rows from one state to the next that rounds track for the prefix cache: as many as a chunk of SGLang's kernels of the gated
# delta rule has, which is the least that it admits for them.
TRACKED_EVERY = 64


def layer(recipe: Recipe, number: int, normal: Normal, *, keeps: Part, attends: Part, feeds: Part) -> Weights:
    """A decoder layer of the target: the last one of every `attends_every` attends, the others keep a state."""
    size = recipe.target.hidden_size
    mixes = keeps if recipe.target.keeps_state(number) else attends
    return {
        "input_layernorm.weight": 1 + normal(size, std=0.1),
        **mixes(recipe, normal),
        "post_attention_layernorm.weight": 1 + normal(size, std=0.1),
        **feeds(recipe, normal),
    }
