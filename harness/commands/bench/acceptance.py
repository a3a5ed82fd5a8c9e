"""What the layout of the draft tree costs: accept lengths in both views (DESIGN 3.4), by the reference alone.

SGLang's branches attend to the earlier rows of their own number (`slot_layout`), official EAGLE's to their ancestors
(`true_tree`, PR #8409). Output is the same in both; the question is how many tokens a round commits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.weights import model_pair
from eagletwin.reference.growth import View, draft_tree, select
from eagletwin.reference.llama import target_rows
from eagletwin.reference.tree import depths, tree_parents, walk_greedy

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
    generator = torch.Generator().manual_seed(5)
    for _ in range(prompts):
        size = int(torch.randint(1, 41, (1,), generator=generator))
        prompt = torch.randint(0, RECIPES[model].target.vocab_size, (size,), generator=generator)
        tokens = greedy(model, prompt, NEW_TOKENS + shape[1] + 2)
        for view, found in lengths.items():
            found += _rounds(model, tokens, size, shape, view)
    slot, true = (sum(found) / len(found) for found in lengths.values())
    return Acceptance(model, shape, slot, true, len(lengths["slot_layout"]))


def greedy(model: str, prompt: Tensor, count: int) -> Tensor:
    """The prompt and what the target says to it [T]: all that verification will ever commit."""
    weights, shape = model_pair(model).reference_target(), RECIPES[model].target
    tokens = prompt
    for _ in range(count):
        tokens = torch.cat([tokens, target_rows(weights, shape, tokens).logits[-1:].argmax(-1)])
    return tokens


def _rounds(model: str, tokens: Tensor, begin: int, shape: tuple[int, int, int], view: View) -> Sequence[int]:
    """Accept lengths of the rounds that commit NEW_TOKENS tokens from position `begin` on."""
    pair, recipe = model_pair(model), RECIPES[model]
    head = pair.reference_head(recipe)
    hidden = target_rows(pair.reference_target(), recipe.target, tokens).hidden
    topk, num_steps, num_draft_tokens = shape
    found, committed = [], begin
    while committed < begin + NEW_TOKENS:
        growth = draft_tree(head, tokens[: committed + 1], hidden, topk, num_steps, view)
        selected, drafted = select(growth.logits, growth.expanded, topk, num_draft_tokens - 1)
        parents = tree_parents(selected, topk, growth.expanded.flatten().tolist())
        # the target's tokens along the accepted path; those of other nodes are not needed
        argmax = [int(tokens[committed + 1 + depth]) for depth in depths(parents)]
        path = walk_greedy([int(tokens[committed]), *drafted], parents, argmax)
        found.append(len(path))
        committed += len(path)
    return found
