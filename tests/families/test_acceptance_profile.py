"""What each recipe promises: every accept length occurs often, and ties are rare. Measured with the reference alone."""

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.recipe import Recipe
from eagletwin.harness.families.weights import model_pair
from eagletwin.harness.judge.bounds import FLOAT32
from eagletwin.reference.chain import draft_chain
from eagletwin.reference.eagle import Head
from eagletwin.reference.llama import target_rows
from eagletwin.reference.mtp import draft_extend
from eagletwin.reference.tree import walk_greedy

PROMPTS, NEW_TOKENS = 24, 24


def profile(name: str, num_steps: int) -> tuple[Counter[int], int, int]:
    """Accept lengths, choices and ties of speculative decoding with the reference, over seeded prompts of 1 to 40 tokens."""
    recipe, pair = RECIPES[name], model_pair(name)
    weights, heads = pair.reference_target(), pair.reference_heads(recipe)
    generator = torch.Generator().manual_seed(5)
    prompts = PROMPTS if recipe.target.num_layers < 10 else PROMPTS // 4  # a target of 45 layers takes its time
    lengths: Counter[int] = Counter()
    choices = ties = 0
    for _ in range(prompts):
        size = int(torch.randint(1, 41, (1,), generator=generator))
        tokens = torch.randint(0, recipe.target.vocab_size, (size,), generator=generator)
        tokens = torch.cat([tokens, target_rows(weights, recipe.target, tokens).logits[-1:].argmax(-1)])
        while len(tokens) < size + 1 + NEW_TOKENS:
            hidden = target_rows(weights, recipe.target, tokens[:-1]).hidden
            logits_of_drafts = _draft(recipe, heads, tokens, hidden, num_steps)
            drafted = logits_of_drafts.argmax(-1)
            nodes = target_rows(weights, recipe.target, torch.cat([tokens, drafted])).logits[len(tokens) - 1 :]
            argmax = nodes.argmax(-1)
            path = walk_greedy([-1, *drafted.tolist()], range(-1, num_steps), argmax.tolist())
            for logits in torch.cat([nodes, logits_of_drafts]):
                choices, ties = choices + 1, ties + bool(FLOAT32.best(logits.numpy(), 1)[1])
            lengths[len(path)] += 1
            tokens = torch.cat([tokens, argmax[path]])
    return lengths, choices, ties


def _draft(recipe: Recipe, heads: Sequence[Head], tokens: Tensor, hidden: Tensor, num_steps: int) -> Tensor:
    """What a round's drafts are chosen from [num_steps, V]."""
    if not recipe.mtp_layers:
        return draft_chain(heads[0], tokens, hidden, num_steps).logits
    rows, layers = range(len(tokens) - 1), heads[:num_steps]
    extended = draft_extend(layers, recipe.chained, tokens, hidden, rows, [None] * num_steps)
    return torch.stack([layer.logits[-1] for layer in extended])


EACH = [(name, min(n, RECIPES[name].mtp_layers or n)) for name in sorted(RECIPES) for n in (1, 3, 5)]
QUICK = {("llama-tiny", 3), ("llama-mtp", 3), ("llama-eagle3", 1)}


@pytest.mark.parametrize(
    ("name", "num_steps"), [row if row in QUICK else pytest.param(*row, marks=pytest.mark.slow) for row in EACH]
)
def test_every_accept_length_occurs_as_often_as_the_recipe_says(name: str, num_steps: int) -> None:
    lengths, choices, ties = profile(name, num_steps)
    rounds = lengths.total()
    for length in range(1, num_steps + 2):
        assert lengths[length] >= RECIPES[name].min_share * rounds, (length, dict(lengths))
    assert ties <= 0.002 * choices, (ties, choices)
