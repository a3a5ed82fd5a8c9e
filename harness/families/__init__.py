"""Model families: all of a family but its arithmetic, which is in `reference/`. One file a family.

RECIPES has the recipes of all families by name, FAMILIES the families. recipe.py says what a family's file holds; a new family
is one such file and its name in the list below. weights.py makes a recipe's numbers, store.py writes its checkpoint, valid.py
says which cases and traces a recipe admits.
"""

from . import (
    deepseek,
    eagle3,
    gemma4,
    gpt_oss,
    kimi_k2,
    llama,
    mimo_v2,
    mtp,
    nemotron_h,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
    standalone,
    step3p5,
)
from .recipe import Family, Recipe

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        llama.FAMILY,
        eagle3.FAMILY,
        mtp.FAMILY,
        mimo_v2.FAMILY,
        step3p5.FAMILY,
        standalone.FAMILY,
        deepseek.FAMILY,
        kimi_k2.FAMILY,
        qwen3.FAMILY,
        qwen3_moe.FAMILY,
        gpt_oss.FAMILY,
        qwen3_next.FAMILY,
        nemotron_h.FAMILY,
        qwen3_5.FAMILY,
        gemma4.FAMILY,
    )
}
RECIPES: dict[str, Recipe] = {recipe.name: recipe for family in FAMILIES.values() for recipe in family.recipes}


def family_of(recipe: Recipe) -> Family:
    """The family of a recipe."""
    return FAMILIES[recipe.family]
