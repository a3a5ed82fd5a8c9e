"""Are an engine's sampled tokens possible? Its accepted path and bonus token are followed, coin by coin, within its error.

An engine computes probabilities in float32 from logits that are off by a little. So a coin close to a boundary may have gone
either way, a token may have fallen on either side of a top_k or top_p cut, and the bonus token is any whose part of the
running sum comes close enough. Such decisions are adopted and counted as ties; anything else is illegal. What no error
excuses: a token of which nothing is left after the cuts, or which was refused, has no probability, and must not be emitted.

Errors are bounds on any sum of entries of a row (cuts.rounding_of). sampling.py says what the decisions are, cuts.py which
tokens may have been kept.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .sampling import EXACT, Kind, Thresholds, acceptance, chain_acceptance, children_of, part_of, without

Targets = Sequence[Sequence[Tensor]]  # for each node the rows [V] that are possible, the reference's own first


@dataclass(frozen=True, slots=True)
class Illegal:
    """The first decision that the coins do not allow: at `node`, on `token`; `by`: beyond the error, in probability."""

    node: int
    token: int
    kind: Kind
    by: float
    why: str


@dataclass(frozen=True, slots=True)
class Followed:
    """illegal: None if all is possible. decisions: how many coins were looked at; ties: of them, adopted ones."""

    illegal: Illegal | None
    decisions: int
    ties: int


class Draws(NamedTuple):
    """The coins of a verify: one a node [D], and what draws the bonus token: another coin, or noise for each token [V].

    relative: where noise draws, how far off a probability may be, of itself, and the sum of a logarithm and noise.
    """

    coins: Sequence[float]
    final: float = 0.0
    noise: Tensor | None = None
    relative: float = 0.0


class Walk(NamedTuple):
    """What a verify decided: the accepted nodes, the root first, and the bonus token."""

    path: Sequence[int]
    bonus: int


def follow_tree(
    targets: Targets,
    tokens: Sequence[int],
    parents: Sequence[int],
    draws: Draws,
    walk: Walk,
    errors: Sequence[float],
    thresholds: Thresholds = EXACT,
) -> Followed:
    """Target-only sampling of a tree: see sample_tree. targets: of each node; errors [D].

    Raises ValueError if the path is none of the tree.
    """
    path = walk.path
    if not path or path[0] != 0:
        raise ValueError(f"a path begins at node 0, and this one is {list(path)}")

    def at(node: int, child: int | None) -> Callable[[Tensor], list[_Finding]]:
        def findings(row: Tensor) -> list[_Finding]:
            found, mass, refused = list[_Finding](), 0.0, list[int]()
            for other in children_of(node, parents):
                own = part_of(tokens[other], row, refused)
                mass += own
                margin = acceptance(own, mass, draws.coins[node], thresholds)
                if other == child and tokens[other] in refused:
                    why = "an elder sibling of this token was refused"
                    return [*found, _Finding(tokens[other], "accept", -math.inf, errors[node], why)]
                if other == child:
                    return [*found, _accept_finding(tokens[other], own > 0, margin, errors[node])]
                found.append(_Finding(tokens[other], "refuse", -margin, errors[node], "the coin accepts this child"))
                refused.append(tokens[other])
            return [*found, _drawn(without(row, refused), row, refused, draws, walk.bonus, 2 * errors[node])]

        return findings

    for parent, child in pairwise(path):
        if parents[child] != parent:
            raise ValueError(f"node {child} of the path is no child of node {parent}")
    following = [*path[1:], None]
    return _follow([(node, targets[node], at(node, child)) for node, child in zip(path, following, strict=True)])


def follow_chain(
    targets: Targets,
    drafts: Tensor,
    tokens: Sequence[int],
    draws: Draws,
    walk: Walk,
    errors: Sequence[float],
    draft_errors: Sequence[float],
) -> Followed:
    """Rejection sampling of a chain: see sample_chain. drafts [K, V]: q; draft_errors [K]: 0 if it is the engine's very own."""
    depth, path = len(drafts), walk.path

    def at(node: int, accepted: bool) -> Callable[[Tensor], list[_Finding]]:
        def findings(row: Tensor) -> list[_Finding]:
            if node == depth:
                return [_drawn(row, row, (), draws, walk.bonus, 2 * errors[node])]
            token, error = tokens[node + 1], errors[node] + draft_errors[node]
            margin = chain_acceptance(row, drafts[node], token, draws.coins[node])
            if accepted:
                return [_accept_finding(token, float(row[token]) > 0, margin, error)]
            refused = _Finding(token, "refuse", -margin, error, "the coin accepts the draft token")
            signed = row - drafts[node].double().nan_to_num(nan=0.0)
            rest = signed.clamp(min=0.0)
            hopeless = [int(place) for place in (signed < -error).nonzero()]
            return [refused, _drawn(rest, row, hopeless, draws, walk.bonus, 2 * error)]

        return findings

    if list(path) != list(range(len(path))) or not 1 <= len(path) <= depth + 1:
        raise ValueError(f"a chain's path has the nodes 0, 1, .. in their order, and this one {list(path)}")
    return _follow([(node, targets[node], at(node, node != path[-1])) for node in path])


@dataclass(frozen=True, slots=True)
class _Finding:
    """A decision as it was made: margin (negative: the coin says otherwise), and what the error may excuse of it."""

    token: int
    kind: Kind
    margin: float
    error: float
    why: str

    @property
    def beyond(self) -> float:
        return -self.margin - self.error


def _accept_finding(token: int, probable: bool, margin: float, error: float) -> _Finding:
    if not probable:
        return _Finding(token, "accept", -math.inf, error, "the target never draws this token")
    return _Finding(token, "accept", margin, error, "the coin refuses this token")


def _drawn(rest: Tensor, row: Tensor, out: Sequence[int], draws: Draws, bonus: int, error: float) -> _Finding:
    """rest [V]: what it is drawn from; row: the target's; out: tokens that cannot have been left."""
    if draws.noise is None:
        return _bonus(rest, row, out, draws.final, bonus, error)
    return _impossible(row, out, bonus, error) or _by_noise(rest, row, bonus, draws.noise, draws.relative)


def _impossible(row: Tensor, out: Sequence[int], bonus: int, error: float) -> _Finding | None:
    if not float(row[bonus]) > 0:
        return _Finding(bonus, "bonus", -math.inf, error, "the target never draws this token")
    if bonus in out:
        return _Finding(bonus, "bonus", -math.inf, error, "nothing of this token is left to draw")
    return None


def _by_noise(rest: Tensor, row: Tensor, bonus: int, noise: Tensor, relative: float) -> _Finding:
    """The bonus token has the largest sum of logarithm and noise; of each what is left is off by a part of its probability."""
    off = relative * row.double()
    low, value, high = ((rest + by).clamp(min=0.0).log().clamp(min=_LEAST) + noise for by in (-off, 0.0, off))
    best = int(low.index_fill(0, torch.tensor([bonus]), -torch.inf).argmax())
    error = float(high[bonus] - value[bonus] + value[best] - low[best]) + 2 * relative
    return _Finding(bonus, "bonus", float(value[bonus] - value[best]), error, "the noise draws another token")


_LEAST = -1e4  # the logarithm of no probability: no noise lifts it over another


def _bonus(rest: Tensor, row: Tensor, out: Sequence[int], coin: float, bonus: int, error: float) -> _Finding:
    """The same, drawn by a coin."""
    if (wrong := _impossible(row, out, bonus, error)) is not None:
        return wrong
    sums = rest.cumsum(0)
    at = coin * float(sums[-1])
    margin = min(at - float(sums[bonus] - rest[bonus]), float(sums[bonus]) - at)
    return _Finding(bonus, "bonus", margin, error, "the coin draws another token")


def follow_bonus(
    node: int, rest: Tensor, row: Tensor, out: Sequence[int], coin: float, bonus: int, error: float
) -> tuple[Illegal | None, bool]:
    """(what is wrong with a bonus token drawn from rest [V], is it a tie). row: the target's; out: what cannot be left."""
    found = _bonus(rest, row, out, coin, bonus, error)
    if not found.beyond <= 0:
        return Illegal(node, bonus, "bonus", found.beyond, found.why), False
    return None, found.margin < error


def _follow(nodes: Sequence[tuple[int, Sequence[Tensor], Callable[[Tensor], list[_Finding]]]]) -> Followed:
    """At each node, some row must allow all that was decided there; the first row's word counts in a report."""
    decisions = ties = 0
    for node, rows, findings in nodes:
        for number, row in enumerate(rows):
            made = findings(row)
            if all(finding.beyond <= 0 for finding in made):
                decisions += len(made)
                ties += len(made) if number else sum(finding.margin < finding.error for finding in made)
                break
        else:
            made = findings(rows[0])
            worst = next(finding for finding in made if not finding.beyond <= 0)  # a coin that is no number is none
            return Followed(Illegal(node, worst.token, worst.kind, worst.beyond, worst.why), decisions + len(made), ties)
    return Followed(None, decisions, ties)
