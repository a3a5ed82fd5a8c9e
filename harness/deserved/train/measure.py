"""How many tokens a round commits, by the reference alone: the target is greedy, and so are its drafts.

The prompts are held-out text. What the target says to a prompt is found first, one token at a time; a round's drafts are then
compared with it, so nothing depends on how an engine batches or stores anything.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagletwin.reference.chain import draft_chain
from eagletwin.reference.llama import target_rows
from eagletwin.reference.mtp import draft_extend
from eagletwin.reference.rows import DraftRows, behind

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
    heads = plan.heads(draft, target)
    found: list[int] = []
    for reply in said:
        hidden = target_rows(target, plan.recipe.target, reply.tokens).hidden
        stored: list[DraftRows | None] = [None] * len(heads)
        committed = reply.size
        while committed < reply.size + settings.new_tokens:
            known = reply.tokens[: committed + 1]
            if plan.recipe.mtp_layers:
                rows = range(0 if stored[0] is None else stored[0].keys.shape[1], committed)
                layers = draft_extend(heads, plan.recipe.chained, known, hidden, rows, stored)
                stored = [behind(old, new) for old, new in zip(stored, layers, strict=True)]
                drafted = [int(layer.logits[-1].argmax()) for layer in layers]
            else:
                drafted = draft_chain(heads[0], known, hidden, settings.num_steps).drafted.tolist()
            following = reply.tokens[committed + 1 :].tolist()
            found.append(next((n for n, token in enumerate(drafted) if token != following[n]), len(drafted)))
            committed += found[-1] + 1
    steps = range(1, settings.num_steps + 1)
    shares = tuple(sum(accepted >= step for accepted in found) / len(found) for step in steps)
    return AcceptLengths(len(found), 1 + sum(shares), shares)
