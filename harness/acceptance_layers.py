"""What rows that keep a rejected draft cost (DESIGN 3.7, boundary KV): accept lengths in both views, by the reference alone.

In `last_fed` rows stay as they were fed, as in SGLang without a hybrid model; in `committed` they are what was committed.
"""

from dataclasses import dataclass

import torch

from eagletwin.reference.eagle import DraftRows
from eagletwin.reference.llama import target_rows
from eagletwin.reference.mtp import draft_extend

from .acceptance import greedy
from .models.recipes import RECIPES
from .models.weights import model_pair

PROMPTS, NEW_TOKENS = 48, 48


@dataclass(frozen=True, slots=True)
class BoundaryCost:
    """Tokens committed a round on average, the bonus token counted, over the same prompts; rounds of `last_fed`.

    stale  share of the stored rows of layers 1.. that are not those of what was committed, at the end
    """

    model: str
    num_steps: int
    last_fed: float
    committed: float
    stale: float
    rounds: int

    @property
    def cost(self) -> float:
        return 1 - self.last_fed / self.committed


def boundary_cost(model: str, num_steps: int, prompts: int = PROMPTS, new_tokens: int = NEW_TOKENS) -> BoundaryCost:
    """Measure one model with num_steps layers, over seeded prompts of 1 to 40 tokens."""
    recipe, pair = RECIPES[model], model_pair(model)
    heads, weights = pair.reference_heads(recipe)[:num_steps], pair.reference_target()
    generator = torch.Generator().manual_seed(5)
    lengths: dict[bool, list[int]] = {True: [], False: []}
    rows = stale = 0
    for _ in range(prompts):
        size = int(torch.randint(1, 41, (1,), generator=generator))
        prompt = torch.randint(0, recipe.target.vocab_size, (size,), generator=generator)
        tokens = greedy(model, prompt, new_tokens + num_steps + 2)
        hidden = target_rows(weights, recipe.target, tokens).hidden
        for keep in (True, False):
            before: list[DraftRows | None] = [None] * num_steps
            begin, end = 0, size
            while end < size + new_tokens:
                layers = draft_extend(heads, recipe.chained, tokens[: end + 1], hidden, range(begin, end), before)
                drafted = [int(layer.logits[-1].argmax()) for layer in layers]
                accepted = next((n for n, token in enumerate(drafted) if token != tokens[end + 1 + n]), num_steps)
                lengths[keep].append(accepted + 1)
                if keep:
                    before = [_joined(old, new) for old, new in zip(before, layers, strict=True)]
                    begin = end
                end += accepted + 1
            if keep:
                whole = draft_extend(heads, recipe.chained, tokens, hidden, range(begin), [None] * num_steps)
                for old, new in zip(before[1:], whole[1:], strict=True):
                    assert old is not None
                    rows += begin
                    stale += int(((old.values - new.values).abs().amax((0, 2, 3)) > 1e-9).sum())
    kept, repaired = (sum(found) / len(found) for found in (lengths[True], lengths[False]))
    return BoundaryCost(model, num_steps, kept, repaired, stale / max(rows, 1), len(lengths[True]))


def _joined(old: DraftRows | None, new: DraftRows) -> DraftRows:
    """Stored rows, the new ones behind the old."""
    if old is None:
        return new
    return DraftRows(new.hidden, new.logits, torch.cat([old.keys, new.keys], 1), torch.cat([old.values, new.values], 1))
