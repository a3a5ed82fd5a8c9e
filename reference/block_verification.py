"""Block verification of a drafted chain: the drafts are accepted or refused as a whole, longest beginning first.

Sun et al. (arXiv 2403.10444), algorithm 2. With r[0] = 1 and r[n] = min(r[n-1] * p(X[n]) / q(X[n]), 1), the beginning of n
drafts is accepted with probability

    h[n] = S / (S + 1 - r[n]),  S = the sum of the positive part of r[n] * p - q after the n-th draft;  h[last] = r[last]

and the longest one is taken that is. The bonus token is drawn from that positive part, normalised, or from p if all were
accepted. It emits the target's distribution and accepts at least as much as rejection sampling does (sampling.py). In SGLang:
--speculative-use-block-verification, in the kernel of rejection sampling (kernels/ops/speculative/reject_sampling.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .follow_sampling import Followed, Illegal, follow_bonus
from .sampling import Decision, Sampled, draw


@dataclass(frozen=True, slots=True)
class Beginning:
    """The first n drafts of a chain. ratio: r[n]; mass: S, 0 for the whole chain; accepted: h[n], 1 for no draft at all."""

    ratio: float
    mass: float
    accepted: float


def beginnings(targets: Tensor, drafts: Tensor, tokens: Sequence[int]) -> list[Beginning]:
    """[K + 1], from none of the drafts to all. targets [K + 1, V], drafts [K, V], tokens [K + 1] as for sample_chain."""
    found, ratio = [Beginning(1.0, float(left_over(1.0, targets[0], drafts[0]).sum()), 1.0)], 1.0
    for node, draft in enumerate(drafts):
        token = tokens[node + 1]
        ratio = min(ratio * float(targets[node][token]) / float(draft[token]), 1.0)
        if node + 1 == len(drafts):
            found.append(Beginning(ratio, 0.0, ratio))
            break
        mass = float(left_over(ratio, targets[node + 1], drafts[node + 1]).sum())
        found.append(Beginning(ratio, mass, mass / (mass + 1 - ratio) if mass + 1 - ratio > 0 else 1.0))
    return found


def left_over(ratio: float, target: Tensor, draft: Tensor) -> Tensor:
    """[V]: the positive part of ratio * p - q."""
    return (ratio * target.double() - draft.double()).clamp(min=0.0)


def sample_block(targets: Tensor, drafts: Tensor, tokens: Sequence[int], coins: Sequence[float], final_coin: float) -> Sampled:
    """coins [K]: coins[n - 1] decides on the beginning of n drafts. q of a drafted token is positive."""
    of, decisions = beginnings(targets, drafts, tokens), list[Decision]()
    length = 0
    for n in range(len(drafts), 0, -1):
        margin = of[n].accepted - coins[n - 1]
        decisions.append(Decision(n, tokens[n], "accept" if margin > 0 else "refuse", abs(margin)))
        if margin > 0:
            length = n
            break
    rest = targets[length] if length == len(drafts) else left_over(of[length].ratio, targets[length], drafts[length])
    bonus, margin = draw(rest, final_coin)
    path = tuple(range(length + 1))
    emitted = (*(tokens[node] for node in path[1:]), bonus)
    return Sampled(path, emitted, (*decisions, Decision(length, bonus, "bonus", margin)))


def follow_block(
    targets: Tensor,
    drafts: Tensor,
    tokens: Sequence[int],
    coins: Sequence[float],
    final_coin: float,
    accepted: int,
    bonus: int,
    error: float,
) -> Followed:
    """Is it possible that `accepted` drafts were, and this bonus token drawn? error: of a sum of probabilities.

    A threshold is off by as much as its parts are, over their sum.
    """
    of, ties = beginnings(targets, drafts, tokens), 0
    for n in range(len(drafts), max(accepted, 1) - 1, -1):
        whole = 1.0 if n == len(drafts) else of[n].mass + 1 - of[n].ratio
        slack = min(1.0, 2 * error / max(whole, 1e-300))
        margin = (of[n].accepted - coins[n - 1]) * (1 if n == accepted else -1)
        if margin < -slack:
            kind, why = ("accept", "the coin refuses these drafts") if n == accepted else ("refuse", "the coin accepts them")
            return Followed(Illegal(n, tokens[n], kind, -margin - slack, why), len(drafts) - n + 1, ties)  # type: ignore[arg-type]
        ties += margin < slack
    row = targets[accepted]
    signed = row if accepted == len(drafts) else of[accepted].ratio * row - drafts[accepted]
    out = [int(place) for place in (signed < -error).nonzero()]
    illegal, tied = follow_bonus(accepted, signed.clamp(min=0.0), row, out, final_coin, bonus, 2 * error)
    return Followed(illegal, len(drafts) - accepted + 2, ties + tied)
