"""Speculative sampling with the coins in hand: which tokens a round emits, and how far each coin was from deciding otherwise.

A *coin* is a number in [0, 1) that the worker drew. Two algorithms, both of which emit what sampling from the target alone
would emit, in distribution:

*Target-only sampling of a tree.* At a node, the coin falls into the target's distribution with the children's tokens laid out
first, in sibling order, and so decides at once which child, if any, is the target's next token: the child whose interval it
falls into is accepted. Otherwise the next token is drawn, with another coin, from what is left of the distribution without the
children. A token is laid out once, however many siblings have it. The draft's probabilities play no part: SpecInfer (arXiv
2305.09781, its naive sampling), and what EAGLE (arXiv 2401.15077) calls for with a draft that proposes without randomness. Two
thresholds of SGLang make it accept more, and are then not the target's distribution any longer.

*Rejection sampling of a chain.* Draft token X was drawn from q. It is accepted with probability min(1, p(X) / q(X)), otherwise
the token is drawn from the positive part of p - q, normalised: Leviathan et al. (arXiv 2211.17192), Chen et al. (arXiv
2302.01318).

In SGLang, `eagle_sample` (srt/speculative/eagle_utils.py) decides on temperature, top_k and top_p, in that order; sgl_kernel's
`tree_speculative_sampling_target_only` on the tree, `kernels/ops/speculative/reject_sampling.py` on the chain. Where a coin
lies on a boundary they may go either way (the margin is 0), but a token of no probability is never right.

Nodes are numbered as in tree.py. This file decides; follow_sampling.py asks whether another's decisions are possible.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["accept", "refuse", "bonus"]
Numbers = float | Tensor


@dataclass(frozen=True, slots=True)
class Thresholds:
    """SGLang's speculative_accept_threshold_single and .._acc. Both 1: the target's distribution."""

    single: float = 1.0
    acc: float = 1.0


EXACT = Thresholds()


@dataclass(frozen=True, slots=True)
class Decision:
    """What a coin decided at `node` on `token`, and by how much, in probability: any smaller error leaves it as it is."""

    node: int
    token: int
    kind: Kind
    margin: float


@dataclass(frozen=True, slots=True)
class Sampled:
    """path: accepted nodes, the root first. emitted: the tokens of path[1:], then the bonus token."""

    path: tuple[int, ...]
    emitted: tuple[int, ...]
    decisions: tuple[Decision, ...]


def target_distribution(logits: Tensor, temperature: Numbers, top_k: Numbers, top_p: Numbers, min_p: Numbers = 0.0) -> Tensor:
    """[.., V] float64: what the target samples from. logits [.., V]; the others are numbers or [..].

    softmax(logits / temperature), of it the top_k largest, of those the fewest largest whose mass reaches top_p, of those what
    has at least min_p of the largest one's probability (arXiv 2407.01082), each normalised again. What ties with the last one
    kept is kept too. SGLang stands for a greedy request by temperature 1 and top_k 1; so a greedy row with a tie is random in
    it, as it is here. top_k >= V keeps all, and so do top_p >= 1 and min_p 0.
    """
    at = logits.device
    scale = torch.as_tensor(temperature, dtype=torch.float64, device=at)
    chances = torch.softmax(logits.double() / scale[..., None], -1)
    chances = keep_top_k(chances, torch.as_tensor(top_k, dtype=torch.int64, device=at))
    chances = keep_top_p(chances, torch.as_tensor(top_p, dtype=torch.float64, device=at))
    return keep_min_p(chances, torch.as_tensor(min_p, dtype=torch.float64, device=at))


def keep_top_k(chances: Tensor, top_k: Tensor) -> Tensor:
    """[.., V]: the top_k [..] largest, and what ties with the last of them, normalised."""
    ordered = chances.sort(-1, descending=True).values
    last = (top_k.expand(chances.shape[:-1]).clamp(1, chances.shape[-1]) - 1)[..., None]
    return _normalize(torch.where(chances >= ordered.gather(-1, last), chances, 0.0))


def keep_top_p(chances: Tensor, top_p: Tensor) -> Tensor:
    """[.., V]: the fewest largest whose mass is at least top_p [..], and what ties with the last of them, normalised."""
    ordered = chances.sort(-1, descending=True).values
    reached = ordered.cumsum(-1) >= top_p.expand(chances.shape[:-1])[..., None]
    last = torch.where(reached.any(-1), reached.int().argmax(-1), chances.shape[-1] - 1)[..., None]
    kept = torch.where(chances >= ordered.gather(-1, last), chances, 0.0)
    return torch.where((top_p >= 1)[..., None], chances, _normalize(kept))


def keep_min_p(chances: Tensor, min_p: Tensor) -> Tensor:
    """[.., V]: what has at least min_p [..] of the largest probability, normalised. Other cuts leave it as it is."""
    least = chances.max(-1, keepdim=True).values * min_p[..., None]
    return torch.where((min_p > 0)[..., None], _normalize(torch.where(chances >= least, chances, 0.0)), chances)


def _normalize(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)


def sample_tree(
    targets: Tensor,
    tokens: Sequence[int],
    parents: Sequence[int],
    coins: Sequence[float],
    final_coin: float,
    thresholds: Thresholds = EXACT,
) -> Sampled:
    """Target-only sampling. targets [D, V] (row n: the next token after node n); tokens, parents, coins [D].

    coins[n] decides among the children of node n. A threshold below 1 accepts a child whose own probability reaches `single`,
    and treats the coin as if it were smaller by the factor `acc` (SGLang divides the sum by it, which it keeps above 1e-9).
    """
    path, decisions = [0], list[Decision]()
    while True:
        node = path[-1]
        accepted, refused, made = _among_children(targets[node], tokens, children_of(node, parents), coins[node], thresholds)
        decisions += [Decision(node, tokens[child], kind, margin) for child, kind, margin in made]
        if accepted is None:
            break
        path.append(accepted)
    token, margin = draw(without(targets[node], refused), final_coin)
    return _sampling_result(path, tokens, Decision(node, token, "bonus", margin), decisions)


def _among_children(
    chances: Tensor, tokens: Sequence[int], children: Sequence[int], coin: float, thresholds: Thresholds
) -> tuple[int | None, list[int], list[tuple[int, Kind, float]]]:
    """(child that is accepted, tokens refused before it, decisions of (child, kind, margin))."""
    mass, refused, made = 0.0, list[int](), list[tuple[int, Kind, float]]()
    for child in children:
        own = part_of(tokens[child], chances, refused)
        mass += own
        margin = acceptance(own, mass, coin, thresholds)
        if own > 0 and margin >= 0:
            return child, refused, [*made, (child, "accept", margin)]
        made.append((child, "refuse", max(-margin, 0.0)))
        refused.append(tokens[child])
    return None, refused, made


def part_of(token: int, chances: Tensor, refused: Sequence[int]) -> float:
    """A child's part of the coin: its token's probability, by chances [V]; none if an elder sibling had this token."""
    return 0.0 if token in refused else float(chances[token])


def acceptance(own: float, mass: float, coin: float, thresholds: Thresholds = EXACT) -> float:
    """By how much a child is accepted, in probability; below 0: by how much it is refused.

    own: its probability; mass: that of itself and its elder siblings. Either threshold will do, so the larger margin counts.
    """
    return max(mass - coin * max(thresholds.acc, 1e-9), own - thresholds.single)


def sample_chain(targets: Tensor, drafts: Tensor, tokens: Sequence[int], coins: Sequence[float], final_coin: float) -> Sampled:
    """Rejection sampling. targets [K + 1, V]; drafts [K, V]: q that the token after node n was drawn from; tokens [K + 1], the
    root's first; coins [K]: coins[n] decides on node n + 1. A q that is no number counts as 0 in the remainder, and refuses."""
    path, decisions = [0], list[Decision]()
    for node in range(len(drafts)):
        token = tokens[node + 1]
        margin = chain_acceptance(targets[node], drafts[node], token, coins[node])
        if not margin > 0:
            decisions.append(Decision(node, token, "refuse", -margin))
            break
        decisions.append(Decision(node, token, "accept", margin))
        path.append(node + 1)
    node = path[-1]
    rest = targets[node] if node == len(drafts) else remainder(targets[node], drafts[node])
    bonus, margin = draw(rest if float(rest.sum()) > 0 else targets[node], final_coin)
    return _sampling_result(path, tokens, Decision(node, bonus, "bonus", margin), decisions)


def chain_acceptance(chances: Tensor, draft: Tensor, token: int, coin: float) -> float:
    """p(X) - coin * q(X): above 0 X is accepted. Minus infinity where q is no number."""
    q = float(draft[token])
    return float(chances[token]) - coin * q if q == q else -float("inf")


def remainder(chances: Tensor, draft: Tensor) -> Tensor:
    """[V]: the positive part of p - q, not normalised. What q is drawn too rarely for."""
    return (chances.double() - draft.double().nan_to_num(nan=0.0)).clamp(min=0.0)


def children_of(node: int, parents: Sequence[int]) -> list[int]:
    """Sibling order is that of their numbers: what next_token and next_sibling lead through (tree.py's retrieve_links)."""
    return [child for child, parent in enumerate(parents) if parent == node]


def without(chances: Tensor, refused: Sequence[int]) -> Tensor:
    """[V]: p without the refused tokens, not normalised."""
    rest = chances.double().clone()
    rest[list(refused)] = 0.0
    return rest


def draw(weights: Tensor, coin: float) -> tuple[int, float]:
    """(token, margin): the first token at which the running sum of weights [V] exceeds coin times their sum.

    Raises ValueError if all weights are 0: nothing can be drawn.
    """
    sums = weights.double().cumsum(0)
    at = coin * float(sums[-1])
    beyond = (sums > at).nonzero().flatten()
    if not len(beyond):
        raise ValueError("there is nothing to draw from: all weights are 0, or the coin is not below 1")
    token = int(beyond[0])
    below = at - float(sums[token - 1]) if token and float(sums[token - 1]) > 0 else float("inf")
    above = float(sums[token]) - at if float(sums[-1]) > float(sums[token]) else float("inf")
    return token, min(below, above)


def _sampling_result(path: list[int], tokens: Sequence[int], bonus: Decision, decisions: list[Decision]) -> Sampled:
    return Sampled(tuple(path), (*(tokens[node] for node in path[1:]), bonus.token), (*decisions, bonus))


# Penalties on tokens that were emitted before: their logits are lowered, by how often they were (frequency), because they were
# (presence), and then scaled towards or away from 0 (repetition; CTRL, arXiv 1909.05858). Prompts do not count. What ends a
# text is impossible as long as it is too short.


def apply_penalties(
    logits: Tensor,
    emitted: Sequence[int],
    frequency: float,
    presence: float,
    repetition: float,
    prompt: Sequence[int] | None = None,
) -> Tensor:
    """One row of logits [V] after these tokens -> [V]. prompt: vLLM's convention, whose repetition comes first, and is of the
    prompt's tokens as well."""
    counts = torch.bincount(torch.tensor(emitted, dtype=torch.int64), minlength=len(logits)).double()  # [V]
    if prompt is not None:
        seen = (counts > 0).index_fill(0, torch.tensor(prompt), True)  # [V]
        scaled = torch.where(logits > 0, logits / repetition, logits * repetition)  # [V]
        return torch.where(seen, scaled, logits) - frequency * counts - presence * (counts > 0)
    lowered = logits - frequency * counts - presence * (counts > 0)  # [V]
    scaled = torch.where(lowered > 0, lowered / repetition, lowered * repetition)  # [V]
    return torch.where(counts > 0, scaled, lowered)


def held_back(logits: Tensor, emitted: int, least: int, ends: Sequence[int]) -> Tensor:
    """One row of logits [V] after so many tokens: what ends a text is impossible before it has `least` -> [V]."""
    if emitted >= least:
        return logits
    return logits.index_fill(-1, torch.tensor(ends), -torch.inf)
