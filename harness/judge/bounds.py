"""When two floats are the same number, and when two logits are too close for the reference to choose between them.

The reference computes in float64, the engine in another type: what it computes in says how far off it may be. One bound serves
all rows of an engine; it scales with the row's magnitude.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.run_spec import Dtype
from eagletwin.harness.families import RECIPES


class Bounds(Struct, frozen=True, kw_only=True):
    """The bounds of an engine that computes in one type.

    relative  how far off a number may be, as a share of the largest magnitude of its row
    tie       how far off the difference of two logits of a row may be, likewise
    adopted_share, tie_share  the largest shares of choices that were adopted from the engine, and of ties. Above either, the
              verdict is unknown: the case says little about the engine. One of each is always allowed
    """

    relative: float
    tie: float
    adopted_share: float
    tie_share: float

    def error_of(self, expected: Array, actual: Array, scale: Array | None = None) -> Array:
        """Largest error of each row as a share of the bound. expected, actual [R, ..] -> [R]; not finite counts as infinite.

        scale [R]: magnitude of the numbers that the row was computed from, where it is not the row's own.
        """
        expected, actual = expected.reshape(len(expected), -1), actual.reshape(len(actual), -1).astype(np.float64)
        size = np.maximum(np.abs(expected).max(1) if scale is None else scale, 1e-30)
        share: Array = np.abs(actual - expected).max(1) / (self.relative * size)
        share[~np.isfinite(actual).all(1)] = np.inf
        return share

    def undecided(self, logits: Array, first: int, second: int) -> bool:
        """Whether the reference cannot tell which of two tokens has the larger logit. logits [V]."""
        if logits[first] == logits[second]:  # both may be -inf
            return True
        return bool(abs(logits[first] - logits[second]) <= self.tie * magnitude(logits))

    def best(self, logits: Array, ranks: int) -> tuple[Array, Array]:
        """The `ranks` largest logits in descending order, and whether each ties with a neighbour: whether the two are closer
        than the bound. logits [.., V] -> tokens, ties [.., ranks]."""
        values, tokens = torch.from_numpy(logits).topk(min(ranks + 1, logits.shape[-1]))
        gaps = -np.diff(values.numpy())
        near = (gaps <= (self.tie * magnitude(logits))[..., None]) | np.isnan(gaps)  # two that are -inf
        tied = np.zeros((*near.shape[:-1], ranks), bool)
        tied[..., : near.shape[-1]] = near
        tied[..., 1:] |= near[..., : ranks - 1]
        return tokens.numpy()[..., :ranks], tied


def magnitude(logits: Array) -> Array:
    """Largest finite size of a row of logits [.., V] -> [..]. A token that cannot be proposed has -inf."""
    size = np.abs(logits)
    largest: Array = np.where(np.isinf(size), 0, size).max(-1)
    return largest


# float32 rounds at 6e-8. A stored number is the end of some 8 dependent sums a layer, over up to 5 layers and the rows of a
# chain, each of some 100 terms: in the worst case these errors add up to 100 * 40 * 6e-8 = 2.4e-4 for one row, and in practice,
# where they are random, to 1e-6 in cases of up to 60 positions. The angles of a float32 rotary embedding lose a bit with each
# doubling of the position: at 600 positions a twelfth of the bound was seen used, at 2,000 a third (docs/records/detection.md).
# A fault moves a row by its own magnitude: a wrong token, position or hidden state by 1e-2 to 1.
# Two logits may each be off by the bound.
#
# The second share is wider than the first: a tie that the engine decides as the reference does is not adopted, and two ties
# in a case of thirty occur by chance.
FLOAT32 = Bounds(relative=1e-4, tie=2e-4, adopted_share=0.05, tie_share=0.25)

# Half the distance of two neighbours of 8 significant bits, as a share of a number.
BFLOAT16_ROUNDING = 2.0**-8

# Of the scores by which an indexer chooses rows: a product of a query and a key is a sum of 128 terms in float32, which is off
# by so much of the sum of their sizes; and a number that lies this near to the middle between two of FP8, as a share of the
# largest of its row, may become either. float32 is some 1e-6 off (below); what decides here may be ten times that.
INDEX_PRODUCT, INDEX_NUMBER = 128 * 2.0**-24, 1e-5
# In bfloat16 a number before it is rounded to FP8 is off by a deviation d of its row's root mean square. Two of FP8 lie up to
# an eighth of a number apart: one that is e off becomes the next one with a share of e / (|x| / 8), and is then off by |x| / 8.
# That is a mean square of E|e| E|x| / 8, 0.08 d of a row's own. A GPU's kernel has a scale of its own as well, the largest
# number over 448 and not the power of two above that: so two roundings differ, each of a mean square of (1/8)**2 / 12 for
# numbers between 1 and 2, whose own is 7 / 3. A score is off by 4 of its deviations, as a logit.
_FP8_MOVED, _FP8_ROUNDING = 0.08, (1 / 8) ** 2 / 12 / (7 / 3)

# Score of a row with itself in the draft of an EAGLE-3 recipe (families/eagle3.py), whose attention passes the token on.
_OWN_SCORE = 13.0


@lru_cache
def bfloat16(model: str) -> Bounds:
    """The bounds of an engine that computes in bfloat16, for a recipe (measured against: docs/explanation/bfloat16.md).

    A rounding is off by at most u = 2**-8 of its number, by 0.41 u in the root mean square. Sums of products are kept in
    float32, so a number is rounded when it is stored: in each layer twice in the residual stream, and 12 times on its branches
    (norm, projection, weights, output and projection of attention; norm, gate, up, activation, product, down), whose numbers
    are `gain` times the stream's; and some 6 times on the way in and out (a draft's own projection, the final norm; of a
    stored key: norm, projection, sine, product). Roundings do not know of each other: their squares add up. What one step of
    a draft hands to the next weighs little there, by a recipe's `noise`.

    Latent attention rounds five times more on its branch: two latent vectors and the norm of one, the product that is moved to
    the query, and that behind the sum over latent rows.

    A draft of EAGLE-3 has a gain of 1, and its attention is sharp: a score of 13, a sum of 16 products of two numbers rounded
    4 times each, is off by 13 * 0.43 * 0.41 u * sqrt(8); where it competes with an equal one, by as much times sqrt(2) / 4 of
    the difference of two values, which is sqrt(2) of one.

    A row is judged by its worst number, and some rows are smaller than the terms that they are sums of: 6 standard deviations.
    A choice is one difference of two numbers that are small compared with the largest logit: 4, which are some 7 of its own.

    Many choices are near-ties then, above all in trees, which rank tokens of small probability. The judge still returns a
    verdict: a wrong token is rarely one of the neighbours in rank, and everything that is not a choice is judged as in float32.
    A verdict is unknown if three quarters of the choices are ties. An engine that rounds fairly decides one tie in eight to one
    in four otherwise than the reference does, one that decides by chance every second: a quarter of all choices is between.
    """
    recipe = RECIPES[model]
    gain = max(recipe.attention_gain, recipe.mlp_gain)
    target, draft = recipe.target.num_layers, recipe.draft.num_layers
    of_branch = [12 if shape.latent is None else 17 for shape in (recipe.target, recipe.draft)]
    roundings = 6 + target * (2 + of_branch[0] * gain**2)
    if recipe.algorithm == "EAGLE3":
        roundings += draft * (2 + of_branch[1]) + (_OWN_SCORE * 0.43 * 8**0.5 / 2) ** 2
    else:
        roundings += draft * (2 + of_branch[1] * gain**2)
    deviation = 0.41 * BFLOAT16_ROUNDING * roundings**0.5
    return Bounds(relative=6 * deviation, tie=4 * deviation, adopted_share=0.25, tie_share=0.75)


def index_within(bounds: Bounds, device: str) -> tuple[float, float, float]:
    """How far off the index scores of an engine with these bounds may be, as the reference has it (reference/layers.py). On a
    CPU the scale is the reference's own power of two."""
    if bounds is FLOAT32:
        return INDEX_PRODUCT, INDEX_NUMBER, 0.0
    rescaled = 0.0 if device == "cpu" else 2 * _FP8_ROUNDING
    return INDEX_PRODUCT, INDEX_NUMBER, 4 * (rescaled + _FP8_MOVED * bounds.relative / 6) ** 0.5


def bounds_of(dtype: Dtype, model: str) -> Bounds:
    """The bounds of an engine that computes in this type, for a recipe."""
    return FLOAT32 if dtype == "float32" else bfloat16(model)


# How the numbers of a trace fall into rows that are compared by a magnitude of their own. Shared by the judge and `diff`.

# A product of probabilities below float32's smallest normal number (e**-87.3) has lost its digits: such scores are all equal.
SMALLEST_LOG = -87.0


def kv_parts(rows: Array) -> int:
    """Into how many parts a KV row of [n, 2, L, G, D] falls: the keys and the values of each layer. An error that is small next
    to the keys may be all that a value is."""
    return int(rows.shape[1] * rows.shape[2])


def logs(probabilities: Array) -> Array:
    """Logarithms, down to that of float32's smallest normal number. A NaN stays one."""
    return np.maximum(np.log(probabilities, dtype=np.float64), SMALLEST_LOG)


def log_scale(logits: Array, temperature: float = 1.0) -> Array:
    """Magnitude that the bound of a log-probability scales with: it is a difference of two of its row's logits [.., V], each of
    which may be off by the bound. -> [..]"""
    scale: Array = 2 * magnitude(logits) / temperature
    return scale


def with_tail(actual: Tensor, expected: Tensor) -> Tensor:
    """A row [V] with its tail put back, where it is 0: the smallest probabilities, as far as their sum is lost in the rounding
    of a float32 sum of all. A cut at top_p 1, made for another request of the batch, may take them off."""
    order = expected.argsort()
    lost = torch.zeros_like(expected, dtype=torch.bool)
    lost[order] = expected[order].cumsum(0) <= sum_rounding(len(expected))
    return torch.where(lost & (actual == 0), expected, actual.double())


def sum_rounding(size: int) -> float:
    """Of any float32 sum of `size` probabilities, in whatever order."""
    return (size + 16) * 2.0**-24


# How the judge computes in a process that is not its own, such as the test suite of a user.

_lock = threading.Lock()
_threads_before: list[int] = []  # of each judge that is at work, how many threads there were before the first


@contextmanager
def quiet_arithmetic() -> Iterator[None]:
    """torch computes in this thread alone and keeps no graph (what autograd keeps of a view costs as much as the view); numpy
    does not warn of what is not finite, since it is compared."""
    with _one_thread(), torch.inference_mode(), np.errstate(all="ignore"):
        yield


@contextmanager
def _one_thread() -> Iterator[None]:
    """A case's tensors are so small that other threads gain nothing, and where there are fewer cores than threads, as in a
    container or with pytest -n, their waiting for each other took 500 ms of a case instead of 6."""
    with _lock:  # another thread may be judging: what it set is not what was there before
        threads = _threads_before[0] if _threads_before else torch.get_num_threads()
        _threads_before.append(threads)
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _lock:
            torch.set_num_threads(_threads_before.pop())
