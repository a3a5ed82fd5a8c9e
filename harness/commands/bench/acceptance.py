"""What the layout of the draft tree costs: accept lengths in both views (DESIGN 3.4), by the reference alone.

SGLang's branches attend to the earlier rows of their own number (`slot_layout`), official EAGLE's to their ancestors
(`true_tree`, PR #8409). Output is the same in both; the question is how many tokens a round commits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eagletwin.harness.deserved.draft import draft_of_recipe
from eagletwin.harness.deserved.follow import Shape
from eagletwin.harness.deserved.trees import follow_trees
from eagletwin.harness.deserved.walk import walk
from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.weights import model_pair
from eagletwin.reference.growth import View
from eagletwin.reference.llama import target_rows

PROMPTS, NEW_TOKENS = 24, 24
# (topk, num_steps, num_draft_tokens); the third is SGLang's default for a Llama
SHAPES = ((2, 3, 7), (3, 4, 12), (4, 5, 8), (8, 5, 32), (8, 8, 64))


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Tokens committed a round on average, the bonus token counted, over the same prompts; rounds of `slot_layout`."""

    model: str
    shape: tuple[int, int, int]
    slot_layout: float
    true_tree: float
    rounds: int

    @property
    def cost(self) -> float:
        """Share of the committed tokens a round that the layout loses."""
        return 1 - self.slot_layout / self.true_tree


def acceptance(model: str, shape: tuple[int, int, int], prompts: int = PROMPTS) -> Acceptance:
    """Measure one model in one shape of tree, over seeded prompts of 1 to 40 tokens."""
    lengths: dict[View, list[int]] = {"slot_layout": [], "true_tree": []}
    topk, num_steps, num_draft_tokens = shape
    generator = torch.Generator().manual_seed(5)
    for _ in range(prompts):
        size = int(torch.randint(1, 41, (1,), generator=generator))
        prompt = torch.randint(0, RECIPES[model].target.vocab_size, (size,), generator=generator)
        tokens = greedy(model, prompt, NEW_TOKENS + num_steps + 2)
        for view, found in lengths.items():
            found += _rounds(model, tokens, size, Shape(num_steps, topk, num_draft_tokens), view)
    slot, true = (sum(found) / len(found) for found in lengths.values())
    return Acceptance(model, shape, slot, true, len(lengths["slot_layout"]))


def greedy(model: str, prompt: Tensor, count: int) -> Tensor:
    """The prompt and what the target says to it [T]: all that verification will ever commit."""
    weights, shape = model_pair(model).reference_target(), RECIPES[model].target
    tokens = prompt
    for _ in range(count):
        tokens = torch.cat([tokens, target_rows(weights, shape, tokens).logits[-1:].argmax(-1)])
    return tokens


def target_says(model: str, prompt: tuple[int, ...], count: int) -> list[int]:
    """The tokens with which the target alone answers a prompt."""
    return greedy(model, torch.tensor(prompt), count)[len(prompt) :].tolist()


def _rounds(model: str, tokens: Tensor, begin: int, shape: Shape, view: View) -> list[int]:
    """Accept lengths of the rounds that commit NEW_TOKENS tokens from position `begin` on."""
    pair, recipe = model_pair(model), RECIPES[model]
    draft = draft_of_recipe(recipe, pair.reference_heads(recipe))
    hidden = target_rows(pair.reference_target(), recipe.target, tokens).hidden
    followed = follow_trees(draft, tokens.tolist(), hidden, shape, 0.0, view)
    return [accepted + 1 for accepted in walk(followed, begin).accepted_before(begin + NEW_TOKENS)]
