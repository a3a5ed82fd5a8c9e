"""What each recipe promises: every accept length occurs often, and ties are rare. Measured with the reference alone."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.recipe import Recipe
from eagletwin.harness.families.weights import model_pair
from eagletwin.harness.judge.bounds import FLOAT32
from eagletwin.reference.draft_heads import FrozenHead
from eagletwin.reference.eagle import Head
from eagletwin.reference.everywhere import chains_everywhere, layers_everywhere
from eagletwin.reference.llama import TargetRows, target_rows

from ..rows import long

PROMPTS, NEW_TOKENS = 24, 24
NUM_STEPS = (1, 3, 5)
# A recipe for each kind of draft, and experts and latent rows.
EACH_DRAFT = (
    "llama-gqa",
    "llama-eagle3",
    "llama-mtp",
    "llama-mtp-chain",
    "llama-standalone",
    "gemma-4-assistant",
    "deepseek-nextn",
)
TOGETHER = 6  # texts in one forward of the target: fewer take more calls, more have more pairs of rows of two texts


def texts(recipe: Recipe) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Seeded prompts of 1 to 40 tokens that the target goes on with: (length of the prompt, x[0..n-1], logits of all but the
    last). As many tokens more than NEW_TOKENS as the longest round that begins there has."""
    weights = model_pair(recipe.name).reference_target()
    generator = torch.Generator().manual_seed(5)
    count = PROMPTS if recipe.target.num_layers < 10 else PROMPTS // 4  # a target of 45 layers takes its time
    sizes, prompts = [], []
    for _ in range(count):
        sizes.append(int(torch.randint(1, 41, (1,), generator=generator)))
        prompts.append(torch.randint(0, recipe.target.vocab_size, (sizes[-1],), generator=generator))
    for begin in range(0, count, TOGETHER):
        tokens = prompts[begin : begin + TOGETHER]
        for _ in range(NEW_TOKENS + max(NUM_STEPS) + 1):
            lengths = [len(text) for text in tokens]
            logits = target_rows(weights, recipe.target, torch.cat(tokens), lengths).logits.split(lengths)
            tokens = [torch.cat([text, rows[-1:].argmax(-1)]) for text, rows in zip(tokens, logits, strict=True)]
        yield from zip(sizes[begin : begin + TOGETHER], tokens, logits, strict=True)


def drafts(recipe: Recipe, heads: Sequence[Head], tokens: Tensor, target: TargetRows) -> Tensor:
    """What the drafts behind x[0..M] are chosen from, as long as those before are the text's: [n-1, S, V], for M = 1..n-1."""
    if recipe.mtp_layers:
        blocks = layers_everywhere(heads, recipe.chained, tokens, target.hidden)
    else:
        head = heads[0]
        if isinstance(head, FrozenHead):
            head = replace(head, memory=(target.keys, target.values))
        blocks = chains_everywhere(head, tokens, target.hidden, max(NUM_STEPS))
    return torch.cat([logits for _, logits in blocks])


@pytest.mark.slow
@pytest.mark.parametrize("name", [*EACH_DRAFT, *long(*sorted(RECIPES.keys() - {*EACH_DRAFT}))])
def test_every_accept_length_occurs_as_often_as_the_recipe_says(name: str) -> None:
    recipe, pair = RECIPES[name], model_pair(name)
    weights, heads = pair.reference_target(), pair.reference_heads(recipe)
    lengths = {min(steps, recipe.mtp_layers or steps): Counter[int]() for steps in NUM_STEPS}
    choices = ties = 0
    for size, tokens, of_target in texts(recipe):
        of_drafts = drafts(recipe, heads, tokens, target_rows(weights, recipe.target, tokens[:-1]))
        drafted = of_drafts.argmax(-1)  # [n-1, S]
        for steps, counted in lengths.items():
            committed = size
            while committed < size + NEW_TOKENS:
                agree = drafted[committed - 1, :steps] == tokens[committed + 1 : committed + 1 + steps]
                accepted = int(agree.long().cumprod(0).sum())
                counted[accepted + 1] += 1
                round_of = (of_drafts[committed - 1, :steps], of_target[committed : committed + accepted + 1])
                for logits in torch.cat(round_of):
                    choices, ties = choices + 1, ties + bool(FLOAT32.best(logits.numpy(), 1)[1])
                committed += accepted + 1
    for steps, counted in lengths.items():
        for length in range(1, steps + 2):
            assert counted[length] >= recipe.min_share * counted.total(), (steps, length, dict(counted))
    assert ties <= 0.002 * choices, (ties, choices)
