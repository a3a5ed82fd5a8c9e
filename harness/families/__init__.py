"""Model families: all of a family but its arithmetic, which is in `reference/`. One file a family.

RECIPES has the recipes of all families by name, FAMILIES the families. recipe.py says what a family's file holds; a new family
is one such file and its name in the list below. weights.py makes a recipe's numbers, store.py writes its checkpoint, valid.py
says which cases and traces a recipe admits.
"""

from importlib import import_module

from .recipe import Family, Recipe

# In the order in which documents list them, and searches take their recipes.
_NAMES = """
llama eagle3 mtp mimo_v2 step3p5 standalone deepseek deepseek_dsa deepseek_v4 kimi_k2 qwen3 qwen3_moe gpt_oss qwen3_next
nemotron_h qwen3_5 gemma4 mimo
""".split()  # noqa: SIM905
_ALL: list[Family] = [import_module(f"{__name__}.{name}").FAMILY for name in _NAMES]
FAMILIES = {family.name: family for family in _ALL}
RECIPES: dict[str, Recipe] = {recipe.name: recipe for family in FAMILIES.values() for recipe in family.recipes}


def family_of(recipe: Recipe) -> Family:
    return FAMILIES[recipe.family]


def runs_on(recipe: Recipe, engine: str) -> bool:
    """Whether eagletwin runs the recipe on this engine."""
    family = family_of(recipe)
    return bool(family.vllm_method) if engine == "vllm" else not family.not_on_sglang
