"""How many tokens a round commits, by the reference alone: the target is greedy, and so are its drafts.

The prompts are held-out text. What the target says to a prompt is found first, one token at a time; it is then followed as any
text is (follow.py, follow.py), so nothing depends on how an engine batches or stores anything.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagletwin.harness.deserved.draft import draft_of_recipe
from eagletwin.harness.deserved.follow import follow_chains, follow_last_fed
from eagletwin.harness.deserved.rounds import walk
from eagletwin.reference.llama import target_rows

from .heads import DraftPlan, Weights
from .settings import PairSettings
from .text import spread_windows


@dataclass(frozen=True, slots=True)
class AcceptLengths:
    """Over `rounds` rounds: accept_length, tokens committed a round, the bonus token counted; accepted[j - 1], the share of
    rounds whose first j drafts are all accepted. The first is one more than the sum of the second."""

    rounds: int
    accept_length: float
    accepted: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Reply:
    """A prompt of `size` tokens and what the target says to it: tokens [T] x[0..T-1], all that verification commits."""

    size: int
    tokens: Tensor


def replies(settings: PairSettings, target: Weights, held_out: Tensor) -> list[Reply]:
    """Greedy replies to held-out prompts, in float64, with as many tokens to spare as a round's drafts look ahead."""
    found = []
    for prompt in spread_windows(held_out, settings.prompts, settings.prompt_size):
        tokens = prompt
        for _ in range(settings.new_tokens + settings.num_steps + 1):
            tokens = torch.cat([tokens, target_rows(target, settings.target, tokens).logits[-1:].argmax(-1)])
        found.append(Reply(len(prompt), tokens))
    return found


def accept_lengths(
    settings: PairSettings, plan: DraftPlan, draft: Weights, target: Weights, said: Sequence[Reply]
) -> AcceptLengths:
    """Rounds that commit `new_tokens` tokens of each reply. Weights are float64."""
    model = draft_of_recipe(plan.recipe, plan.heads(draft, target))
    found: list[int] = []
    for reply in said:
        tokens, hidden = reply.tokens.tolist(), target_rows(target, plan.recipe.target, reply.tokens).hidden
        if model.layers:
            followed = follow_last_fed(model, tokens, hidden, reply.size, settings.num_steps, 0.0, None)
        else:
            followed = follow_chains(model, tokens, hidden, settings.num_steps, 0.0)
        found += walk(followed, reply.size).accepted_before(reply.size + settings.new_tokens)
    steps = range(1, settings.num_steps + 1)
    shares = tuple(sum(accepted >= step for accepted in found) / len(found) for step in steps)
    return AcceptLengths(len(found), 1 + sum(shares), shares)
