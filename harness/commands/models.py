"""`eagletwin info models`: which model recipes there are, and what a case of each cannot be, for people and for programs."""

import json
from typing import Annotated

import typer

from eagletwin.harness.core.errors import EXIT_EQUAL
from eagletwin.harness.core.terminal import count


def models(as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False) -> int:
    """List the model recipes: tiny, synthetic target / draft pairs, one family a block."""
    from eagletwin.harness.families import FAMILIES

    facts = [
        {
            "family": family.name,
            "stores": family.stored,
            "limits": list(family.limits),
            "recipes": [
                {
                    "name": recipe.name,
                    "algorithm": recipe.algorithm,
                    "target_layers": recipe.target.num_layers,
                    "vocabulary": recipe.target.vocab_size,
                    "draft_vocabulary": recipe.draft_vocab_size or recipe.target.vocab_size,
                    "draft_layers": recipe.mtp_layers or 1,
                    "chained": recipe.chained,
                    "target_hidden": recipe.target_hidden,
                    "max_position": recipe.max_position,
                    "window": recipe.window,
                }
                for recipe in family.recipes
            ],
        }
        for family in FAMILIES.values()
    ]
    if as_json:
        print(json.dumps(facts, indent=1))
        return EXIT_EQUAL
    for family in FAMILIES.values():
        print(f"{family.name}{': ' if family.limits else ''}{', '.join(family.limits)}")
        for recipe in family.recipes:
            layers = f", {recipe.mtp_layers} draft layers{', chained' if recipe.chained else ''}" if recipe.mtp_layers else ""
            reduced = f", draft vocabulary {recipe.draft_vocab_size}" if recipe.draft_vocab_size else ""
            target = f"target of {count(recipe.target.num_layers, 'layer')}, vocabulary {recipe.target.vocab_size}"
            print(f"  {recipe.name:18} {recipe.algorithm:7} {target}{reduced}{layers}")
    print(
        "\nThe weights are made from a seed. A case names a recipe as its `model`, and no other checkpoint."
        "\nOf your own checkpoint `eagletwin acceptance` says what it deserves, `eagletwin record` what a server does with it."
    )
    return EXIT_EQUAL
