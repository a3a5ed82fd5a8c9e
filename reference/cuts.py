"""Which tokens may an engine have kept, where it cut at top_k, top_p and min_p? sampling.py says which ones it must keep.

An engine cuts in float32. So tokens close to the last one kept may fall on either side, and a sum close to top_p may or may not
reach it: then several sets of tokens are possible, and the cut is in doubt. It is asked of the very logits that the engine cut.
Nothing is left then but the roundings of float32: of the quotient, the exponential, the divisions and the sums. Among a hundred
tokens a cut is in doubt once in some hundred rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

from .sampling import target_distribution

MOST_ROWS = 64  # of one node. Where more are possible, half the vocabulary ties, and nothing could be told
UNIT = 2.0**-24  # float32 rounds by at most this share of a number


def targets_of_float32(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float = 0.0) -> list[Tensor]:
    """Rows [V] that an engine may have sampled from: that of exact arithmetic, then those with other cuts. logits [V], finite
    or minus infinity; top_k >= V, top_p 1 and min_p 0 keep all.

    A cut is in doubt if logits tie with the pivot within their error, or a sum reaches top_p within its own, or a logit is as
    far below the largest as min_p allows. Logits that are equal have equal probabilities, and are kept together. A logit of
    minus infinity is never kept. Raises ValueError if more than MOST_ROWS are possible, or none is: where no logit is finite.
    """
    rounding, exact = rounding_of(logits, temperature), logits.double() / temperature
    doubt = _Doubt(exact, 2 * rounding.entry)
    able = [int(token) for token in logits.isfinite().nonzero()]
    if not able:
        raise ValueError("no logit is finite: there is nothing to sample from")
    kept_sets = {frozenset(able)} if top_k >= len(able) else doubt.largest(able, [top_k])
    if top_p < 1:
        kept_sets = {cut for kept in kept_sets for cut in doubt.of_mass(sorted(kept), top_p, rounding.sum)}
    if min_p > 0:
        least = float(exact.max()) + math.log(min_p)
        kept_sets = {cut for kept in kept_sets for cut in doubt.at_least(sorted(kept), least)}
    first = target_distribution(logits, temperature, top_k, top_p, min_p)
    own = frozenset(int(token) for token in (first > 0).nonzero())
    others = sorted(sorted(kept) for kept in kept_sets - {own})
    return [first, *(_over(exact, kept) for kept in others)]


class Rounding(NamedTuple):
    """How far float32 is off, from logits that are exact.

    entry  an entry of a softmax, as a share of it, but for a factor that all entries of the row have in common
    sum    any sum of entries, once they are normalised, and the logarithm of one of them
    """

    entry: float
    sum: float


def rounding_of(logits: Tensor, temperature: float) -> Rounding:
    """Of the softmax of logits [V], and of its cuts. A rounding is u = 2**-24 of a number, and `size` the largest logit /
    temperature.

    entry: its exponent is off by 3 u size from the quotient (the temperature itself, its reciprocal, the product), by 2 u size
    from the difference to the largest, and by 4 u size where the exponential is one of base 2 (the product with log2 e, and
    that number itself). The exponential is off by 4 u (the coarsest is CUDA's of base 2), and each of the divisions, of the
    softmax, at top_k and at top_p, by u, as is the product with min_p: 8 u.

    sum: a relative error d of the entries changes each by a factor between exp(-2d) and exp(2d). So it moves a sum and its
    complement by at most half of exp(2d) - 1, and the logarithm of an entry by 2d. Two sums are added up, that which the
    entries were divided by last and the running one: V - 1 roundings each. The two that are left of 2 V are of top_p itself and
    of a difference of sums.
    """
    finite = logits[logits.isfinite()].double().abs()
    size = float(finite.max()) / temperature if len(finite) else 0.0
    entry = min((9 * size + 8) * UNIT, 1.0)  # of more nothing could be told
    return Rounding(entry, math.expm1(2 * entry) + 2 * len(logits) * UNIT)


@dataclass(frozen=True, slots=True)
class _Doubt:
    """Which sets of tokens a cut may keep. exact [V]: logits / temperature; near: those that are so close may tie."""

    exact: Tensor
    near: float

    def largest(self, among: Sequence[int], counts: Sequence[int]) -> set[frozenset[int]]:
        """Sets that the largest `count` of these tokens may be, for each of counts; what ties with the last may come along."""
        found = set[frozenset[int]]()
        values = {token: float(self.exact[token]) for token in among}
        for count in counts:
            pivot = sorted(values.values(), reverse=True)[min(count, len(values)) - 1]
            above = frozenset(token for token, value in values.items() if value > pivot + self.near)
            level = self._level({token: value for token, value in values.items() if abs(value - pivot) <= self.near})
            if len(level) > 8:
                raise ValueError(f"{len(level)} tokens tie at a cut: which of them are kept cannot be told")
            for some in _unions(level):
                if len(above) + len(some) >= count and some:
                    found.add(above | some)
        if len(found) > MOST_ROWS:
            raise ValueError(f"{len(found)} cuts are possible: which of them was made cannot be told")
        return found

    def of_mass(self, among: Sequence[int], top_p: float, error: float) -> set[frozenset[int]]:
        sums = torch.softmax(self.exact[list(among)], 0).sort(descending=True).values.cumsum(0).tolist()
        counts = [n + 1 for n, mass in enumerate(sums) if mass >= top_p - error and (n == 0 or sums[n - 1] < top_p + error)]
        return self.largest(among, counts or [len(sums)])

    def at_least(self, among: Sequence[int], least: float) -> set[frozenset[int]]:
        """Sets that the tokens of at least this logit may be."""
        values = {token: float(self.exact[token]) for token in among}
        surely = frozenset(token for token, value in values.items() if value > least + self.near)
        level = self._level({token: value for token, value in values.items() if abs(value - least) <= self.near})
        if 2 ** len(level) > MOST_ROWS:
            raise ValueError(f"{len(level)} tokens are as likely as min_p demands: which of them are kept cannot be told")
        return {cut for some in _unions(level) if (cut := surely | some)}

    def _level(self, values: dict[int, float]) -> list[frozenset[int]]:
        """Tokens that tie, in parts of which each is kept or not."""
        return [frozenset(token for token, own in values.items() if own == value) for value in sorted(set(values.values()))]


def _unions(parts: Sequence[frozenset[int]]) -> list[frozenset[int]]:
    """Of any of the parts, none and all among them."""
    return [frozenset[int]().union(*some) for size in range(len(parts) + 1) for some in combinations(parts, size)]


def _over(exact: Tensor, kept: Sequence[int]) -> Tensor:
    row = torch.zeros_like(exact)
    row[list(kept)] = torch.softmax(exact[list(kept)], 0)
    return row
