"""Rounds that a text deserves: it is walked as a server with this draft would, with the reference's drafts.

From M committed tokens, so many drafts that agree with the text are accepted, and one token more is committed. The text is what
came back, so the last round ends with it. For tests of servers. It shares no code with harness/deserved on purpose: each round
is drafted by itself, by the reference's naive forms, and a test of the one is a test of the other.
"""

import torch

from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.weights import model_pair
from eagletwin.reference.chain import draft_chain
from eagletwin.reference.draft_heads import DraftRows, behind
from eagletwin.reference.growth import draft_tree, select
from eagletwin.reference.llama import target_rows
from eagletwin.reference.mtp import draft_extend
from eagletwin.reference.tree import depths, tree_parents, walk_greedy

_UNKNOWN = -2  # behind the end of the text; no draft is it


def rounds_deserved(
    model: str, prompt: list[int], output: list[int], num_steps: int, topk: int = 1, nodes: int = 0
) -> tuple[int, bool]:
    """How many rounds, and whether the text is the target's greedy one. nodes: of a tree, the root among them."""
    recipe, pair = RECIPES[model], model_pair(model)
    heads, text = pair.reference_heads(recipe), torch.tensor(prompt + output)
    target = target_rows(pair.reference_target(), recipe.target, text)
    greedy = bool((target.logits[len(prompt) - 1 : -1].argmax(-1) == text[len(prompt) :]).all())
    layers = _Layers(model, num_steps)
    committed, rounds = len(prompt), 0
    while committed + 1 < len(text):  # the token behind the last committed one is the bonus of a round
        known = text[: committed + 1]
        follows = [*text[committed + 1 :].tolist(), *[_UNKNOWN] * (num_steps + 1)]
        if topk > 1:
            growth = draft_tree(heads[0], known, target.hidden, topk, num_steps, "slot_layout")
            selected, drafted = select(growth.logits, growth.expanded, topk, nodes - 1)
            parents = tree_parents(selected, topk, growth.expanded.flatten().tolist())
            path = walk_greedy([_UNKNOWN, *drafted], parents, [follows[depth] for depth in depths(parents)])
        else:
            drafted = (
                layers.draft(known, target.hidden) or draft_chain(heads[0], known, target.hidden, num_steps).drafted.tolist()
            )
            path = walk_greedy([_UNKNOWN, *drafted], range(-1, num_steps), follows)
        committed, rounds = committed + len(path), rounds + 1
    return rounds, greedy


class _Layers:
    """A multi-layer draft as SGLang feeds it: rows that were fed a draft keep it (reference/mtp.py, `last_fed`)."""

    def __init__(self, model: str, num_steps: int) -> None:
        self._recipe = RECIPES[model]
        self._heads = model_pair(model).reference_heads(self._recipe)[:num_steps]
        self._before: list[DraftRows | None] = [None] * num_steps
        self._done = 0

    def draft(self, known: torch.Tensor, hidden: torch.Tensor) -> list[int]:
        """Drafts of all layers; none of a draft with a single head."""
        if not self._recipe.mtp_layers:
            return []
        rows = range(self._done, len(known) - 1)
        found = draft_extend(self._heads, self._recipe.chained, known, hidden, rows, self._before)
        self._before = [behind(old, new) for old, new in zip(self._before, found, strict=True)]
        self._done = rows.stop
        return [int(layer.logits[-1].argmax()) for layer in found]
