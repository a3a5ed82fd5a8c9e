"""Are an engine's sampled tokens possible? Its accepted path and bonus token are followed, coin by coin, within its error.

An engine computes probabilities in float32 from logits that are off by a little. So a coin close to a boundary may have gone
either way, a token may have fallen on either side of a top_k or top_p cut, and the bonus token is any whose part of the
running sum comes close enough. Such decisions are adopted and counted as ties; anything else is illegal. What no error
excuses: a token of which nothing is left after the cuts, or which was refused, has no probability, and must not be emitted.

Errors are bounds on any sum of entries of a row (softmax_error). sampling.py says what the decisions are.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .sampling import EXACT, Kind, Thresholds, acceptance, chain_acceptance, children_of, target_distribution, without

Targets = Sequence[Sequence[Tensor]]  # for each node the rows [V] that are possible, the reference's own first
MOST_ROWS = 64  # of one node. Where more are possible, half the vocabulary ties, and nothing could be told


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


def softmax_error(logit_error: float, temperature: float, vocabulary: int) -> float:
    """Bound on any sum of entries of a float32 softmax row against float64's, cuts included.

    Logits off by d <= logit_error / temperature change each entry by a factor between exp(-2d) and exp(2d), and a sum and its
    complement as well: at most half of exp(2d) - 1. Cuts leave a softmax over fewer logits. Float32's own part: one rounding
    each for an entry's quotient, exponential, division and two renormalisations, and one for each addition of a running sum.
    """
    moved = math.expm1(2 * logit_error / temperature) / 2
    return min(1.0, moved + (vocabulary + 16) * 2.0**-24)


def possible_targets(
    logits: Tensor, temperature: float, top_k: int, top_p: float, logit_error: float, min_p: float = 0.0
) -> list[Tensor]:
    """Rows [V] that an engine may have sampled from: the reference's own, then those with other cuts. logits [V].

    A cut is in doubt if logits tie with the pivot within twice their error, or a sum reaches top_p within its own, or a logit
    is as far below the largest as min_p allows, within twice its error. A logit of minus infinity is never kept. Raises
    ValueError if more than MOST_ROWS are possible.
    """
    size = len(logits)
    exact = logits.double() / temperature
    near = 2 * logit_error / temperature + 2.0**-20  # and float32's probabilities may tie where logits do not
    error = softmax_error(logit_error, temperature, size)
    able = [int(token) for token in logits.isfinite().nonzero()]
    kept_sets = {frozenset(able)} if top_k >= len(able) else _cuts(exact, able, [top_k], near)
    if top_p < 1:
        kept_sets = {cut for kept in kept_sets for cut in _cuts_at_mass(exact, sorted(kept), top_p, near, error)}
    if min_p > 0:
        least = float(exact.max()) + math.log(min_p)
        kept_sets = {cut for kept in kept_sets for cut in _cuts_at_least(exact, sorted(kept), least, near)}
    first = target_distribution(logits, temperature, top_k, top_p, min_p)
    own = frozenset(int(token) for token in (first > 0).nonzero())
    others = sorted(sorted(kept) for kept in kept_sets - {own})
    return [first, *(_over(exact, kept) for kept in others)]


def _cuts(exact: Tensor, among: Sequence[int], counts: Sequence[int], near: float) -> set[frozenset[int]]:
    """Sets that the largest `count` of these tokens may be, for each of counts; what ties with the last may come along."""
    found = set[frozenset[int]]()
    values = {token: float(exact[token]) for token in among}
    for count in counts:
        pivot = sorted(values.values(), reverse=True)[min(count, len(values)) - 1]
        above = frozenset(token for token, value in values.items() if value > pivot + near)
        level = [token for token, value in values.items() if abs(value - pivot) <= near]
        if len(level) > 8:
            raise ValueError(f"{len(level)} tokens tie at a cut: which of them are kept cannot be told")
        for size in range(max(count - len(above), 1), len(level) + 1):
            found |= {above | set(chosen) for chosen in combinations(level, size)}
    if len(found) > MOST_ROWS:
        raise ValueError(f"{len(found)} cuts are possible: which of them was made cannot be told")
    return found


def _cuts_at_mass(exact: Tensor, among: Sequence[int], top_p: float, near: float, error: float) -> set[frozenset[int]]:
    sums = torch.softmax(exact[list(among)], 0).sort(descending=True).values.cumsum(0).tolist()
    counts = [n + 1 for n, mass in enumerate(sums) if mass >= top_p - error and (n == 0 or sums[n - 1] < top_p + error)]
    return _cuts(exact, among, counts or [len(sums)], near)


def _cuts_at_least(exact: Tensor, among: Sequence[int], least: float, near: float) -> set[frozenset[int]]:
    """Sets that the tokens of at least this logit may be."""
    surely = frozenset(token for token in among if float(exact[token]) > least + near)
    level = [token for token in among if abs(float(exact[token]) - least) <= near]
    if 2 ** len(level) > MOST_ROWS:
        raise ValueError(f"{len(level)} tokens are as likely as min_p demands: which of them are kept cannot be told")
    chosen = (combinations(level, size) for size in range(len(level) + 1))
    return {cut for some in chosen for one in some if (cut := surely | frozenset(one))}


def _over(exact: Tensor, kept: Sequence[int]) -> Tensor:
    row = torch.zeros_like(exact)
    row[list(kept)] = torch.softmax(exact[list(kept)], 0)
    return row


class Draws(NamedTuple):
    """The coins of a verify: one a node [D], and the one that draws the bonus token."""

    coins: Sequence[float]
    final: float


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
                own = float(row[tokens[other]])
                mass += own
                margin = acceptance(own, mass, draws.coins[node], thresholds)
                if other == child:
                    return [*found, _accepted(tokens[other], own > 0, margin, errors[node])]
                found.append(_Finding(tokens[other], "refuse", -margin, errors[node], "the coin accepts this child"))
                refused.append(tokens[other])
            return [*found, _bonus(without(row, refused), row, refused, draws.final, walk.bonus, 2 * errors[node])]

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
                return [_bonus(row, row, (), draws.final, walk.bonus, 2 * errors[node])]
            token, error = tokens[node + 1], errors[node] + draft_errors[node]
            margin = chain_acceptance(row, drafts[node], token, draws.coins[node])
            if accepted:
                return [_accepted(token, float(row[token]) > 0, margin, error)]
            refused = _Finding(token, "refuse", -margin, error, "the coin accepts the draft token")
            signed = row - drafts[node].double().nan_to_num(nan=0.0)
            rest = signed.clamp(min=0.0)
            hopeless = [int(place) for place in (signed < -error).nonzero()]
            return [refused, _bonus(rest, row, hopeless, draws.final, walk.bonus, 2 * error)]

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


def _accepted(token: int, probable: bool, margin: float, error: float) -> _Finding:
    if not probable:
        return _Finding(token, "accept", -math.inf, error, "the target never draws this token")
    return _Finding(token, "accept", margin, error, "the coin refuses this token")


def _bonus(rest: Tensor, row: Tensor, out: Sequence[int], coin: float, bonus: int, error: float) -> _Finding:
    """rest [V]: what it is drawn from; row: the target's; out: tokens that cannot have been left."""
    if not float(row[bonus]) > 0:
        return _Finding(bonus, "bonus", -math.inf, error, "the target never draws this token")
    if bonus in out:
        return _Finding(bonus, "bonus", -math.inf, error, "nothing of this token is left to draw")
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
