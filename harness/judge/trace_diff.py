"""Two traces of one case, number for number: which of two engines, or of two runs, did something else?

Not the judge: nothing here says which of the two is right. Records are matched by key (request, round, stage, step). One trace
stands in the reference's place: rows, logarithms and magnitudes are those of the judge, so a number that is further off than
the bound is so for both. Where two engines are off from the reference in opposite directions, each within the bound, they may
be up to two bounds apart: that is a difference.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.case import Sampling
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.records import Key
from eagletwin.harness.core.terminal import count
from eagletwin.harness.core.trace import Trace, on_host
from eagletwin.harness.families.weights import model_pair
from eagletwin.reference.cuts import rounding_of

from .bounds import Bounds, bounds_of, log_scale, logs, magnitude, quiet_arithmetic, with_tail
from .model import model_of
from .replay import RequestReplay, replay_requests
from .request_logits import before_additions
from .rules.sessions import with_full_prompts


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """One tensor or number that differs. `bits` only: floats which differ within the judge's bound."""

    where: str
    left: str
    right: str
    bits: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """compared: how many tensors and numbers were looked at; largest: largest float difference, relative to what the judge's
    bound scales with."""

    differences: list[TensorDifference]
    compared: int
    largest: float

    @property
    def same(self) -> bool:
        return all(difference.bits for difference in self.differences)


def diff(left: Trace, right: Trace) -> Comparison:
    """Compare two traces of the same case, rank by rank. Raises InputError if the cases differ, or how many ranks or stages
    there are."""
    if left.header.case.requests != right.header.case.requests or left.header.weights != right.header.weights:
        raise InputError(
            "the two traces are not of the same requests and weights",
            consequence="nothing was compared",
            remedy="record the same case on both engines",
        )
    if _of_each(left) != _of_each(right):
        raise InputError(
            f"one trace is of {_of_each(left)}, the other of {_of_each(right)}",
            consequence="nothing was compared: each holds another part of the rows",
            remedy="record both with the same --tp and --pp",
        )
    found: list[TensorDifference] = []
    compared, largest = 0, 0.0
    for rank, (one, two) in enumerate(zip(left.processes, right.processes, strict=True)):
        of_rank = _diff_rank(one, two, f"rank {rank}, " if left.others else "")
        found += of_rank.differences
        compared, largest = compared + of_rank.compared, max(largest, of_rank.largest)
    return Comparison(found, compared, largest)


def _of_each(trace: Trace) -> str:
    return count(len(trace.processes), "stage" if trace.earlier else "rank")


def _diff_rank(left: Trace, right: Trace, rank: str) -> Comparison:
    ours = {record.key: n for n, record in enumerate(left.header.records)}
    theirs = {record.key: n for n, record in enumerate(right.header.records)}
    found: list[TensorDifference] = []
    compared, largest = 0, 0.0
    both = (bounds_of(trace.header.engine.dtype, left.header.case.model) for trace in (left, right))
    bounds = max(both, key=lambda bounds: bounds.relative)
    distances, latent = Distances(left, right, bounds), model_of(left.header).latent
    for key in ours | theirs:
        where = rank + _where(key)
        if key not in ours or key not in theirs:
            found.append(_presence(where, key in ours, key in theirs))
            continue
        a, b = left.header.records[ours[key]], right.header.records[theirs[key]]
        for name in sorted(a.numbers.keys() | b.numbers.keys()):
            compared += 1
            if a.numbers.get(name) != b.numbers.get(name):
                found.append(
                    TensorDifference(f"{where}, {name}", str(a.numbers.get(name)), str(b.numbers.get(name)), bits=False)
                )
        for name in sorted({*a.tensors, *b.tensors}):
            if name not in a.tensors or name not in b.tensors:
                compared += 1
                found.append(_presence(f"{where}, {name}", name in a.tensors, name in b.tensors))
                continue
            for part, one, two in _parts(name, left.tensor(ours[key], name), right.tensor(theirs[key], name), latent):
                compared += 1
                if one.shape != two.shape:
                    shapes = f"shape {tuple(one.shape)}", f"shape {tuple(two.shape)}"
                    found.append(TensorDifference(f"{where}, {part}", *shapes, bits=False))
                elif not torch.equal(one, two):
                    one, two = _mask_equal_nonfinite(one, two)
                    if torch.equal(one, two):
                        continue
                    share = None
                    if one.is_floating_point():
                        share = distances.shares(ours[key], theirs[key], name, on_host(one), on_host(two))
                    largest = largest if share is None else max(largest, float(share.max()) * bounds.relative)
                    found.append(_difference(f"{where}, {part}", one, two, share))
    return Comparison(found, compared, largest)


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _mask_equal_nonfinite(one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
    """Both with 0 where both have the same bits of no finite number: a NaN is unequal to itself, and here it is the same."""
    if one.dtype != two.dtype or not one.is_floating_point():
        return one, two
    integers = _BITS[one.element_size()]
    shared = (one.view(integers) == two.view(integers)) & ~one.isfinite()
    return one.masked_fill(shared, 0), two.masked_fill(shared, 0)


def _where(key: Key) -> str:
    return (
        f"{key.stage} step {key.step}"
        + (f", layer {key.layer}" if key.layer else "")
        + (f", attempt {key.attempt}" if key.attempt else "")
        + (f" of request {key.request}, round {key.round}" if key.request else "")
    )


def _parts(name: str, one: Tensor, two: Tensor, latent: tuple[int, ...]) -> list[tuple[str, Tensor, Tensor]]:
    """What of a tensor is compared by itself, under which name: keys and values are not of one magnitude, nor are the two parts
    of a latent row, of which the first is `latent` wide."""
    if not name.endswith("_kv") or one.shape != two.shape:
        return [(name, one, two)]
    if latent:
        begins = zip(("latent vector", "turned key", "index key"), (0, *latent), latent, strict=False)
        parts = [(part, slice(begin, end)) for part, begin, end in begins]
        return [(f"{name} ({part})", one[:, 0, ..., at], two[:, 0, ..., at]) for part, at in parts]
    return list(zip((f"{name} (keys)", f"{name} (values)"), one.unbind(1), two.unbind(1), strict=True))


def _difference(where: str, one: Tensor, two: Tensor, share: Array | None) -> TensorDifference:
    """Two tensors of one shape, where they differ most. share [R]: of floats, how far their rows are apart, in bounds."""
    error = (one.double() - two.double()).abs().nan_to_num(torch.inf).flatten()
    at = int(error.argmax())
    if share is not None:
        width = len(error) // len(share)
        row = int(share.argmax())
        at = row * width + int(error[row * width : (row + 1) * width].argmax())
    numbers = str(one.flatten()[at].item()), str(two.flatten()[at].item())
    return TensorDifference(f"{where}, element {at}", *numbers, bits=share is not None and bool(share.max() <= 1))


def _presence(where: str, left: bool, right: bool) -> TensorDifference:
    left_word, right_word = ("recorded" if there else "absent" for there in (left, right))
    return TensorDifference(where, left_word, right_word, bits=False)


_LOGARITHMS = ("_probabilities", "_scores")


class Distances:
    """Of the floats of another trace to those of `trace`."""

    def __init__(self, trace: Trace, other: Trace, bounds: Bounds) -> None:
        self._trace, self._other, self._bounds = trace, other, bounds
        self._known: dict[str, RequestReplay] | None = None

    def shares(self, number: int, there: int, name: str, one: Array, other: Array) -> Array:
        """Of each row, how far it is off as a share of the bound. one: what record `number` has as `name`, of KV rows only the
        keys or only the values [n, L, G, D]; other: what the other trace has in record `there`, of the same shape. -> [R]

        A number that is not finite, and a coin that is not the same, count as infinitely far.
        """
        if name.endswith("coins"):  # drawn or hashed, never computed
            return np.where(one == other, 0.0, np.inf).reshape(-1)
        scale = None
        with quiet_arithmetic():
            if name == "target_logits":
                scale = self._before_changes(number)
            if name.endswith(_LOGARITHMS):
                one, other, scale = self._logarithms(number, name, one, other)
            rows = _rows(name, one)
            share = self._bounds.error_of(rows, _rows(name, other), scale)
            if name == "target_probabilities":
                made = self._as_made(number, there)
                share = np.where(made > 1, np.maximum(share, made), share)  # else what counts is how far the logits are
        return np.where(np.isfinite(rows).all(1), np.nan_to_num(share, nan=np.inf, posinf=np.inf), np.inf)

    def _as_made(self, number: int, there: int) -> Array:
        """How much more one worker's distributions are off from its own logits than the other's, as a share of the bound, which
        is that of float32 alone. -> [R]; 0 where a trace does not have the logits, or other tokens were kept."""
        made = list[tuple[Tensor, Tensor]]()
        for trace, at in ((self._trace, number), (self._other, there)):
            if "target_logits" not in trace.header.records[at].tensors:
                return np.zeros(1)
            made.append((trace.tensor(at, "target_logits").double(), trace.tensor(at, "target_probabilities").double()))
            if made[-1][0].shape != made[-1][1].shape:
                return np.zeros(1)
        sampling = self._trace.header.case.sampling_of(self._trace.header.records[number].request) or Sampling()
        kept = (made[0][1] > 0) & (made[1][1] > 0)
        off = []
        for logits, actual in made:
            expected = (logits / sampling.temperature).masked_fill(actual == 0, -torch.inf).softmax(-1)
            off.append(np.where(kept, logs(actual.numpy()) - logs(expected.numpy()), 0))
        bounds = np.array([rounding_of(row, sampling.temperature).sum for row in made[0][0]])
        share: Array = np.abs(off[0] - off[1]).max(1) / bounds
        return share

    def _before_changes(self, number: int) -> Array | None:
        """Magnitude that the judge's bound of each row of target_logits [R, V] scales with -> [R]; None: that of the row."""
        record, case = self._trace.header.records[number], self._trace.header.case
        logits = on_host(self._trace.tensor(number, "target_logits"))  # what both forbid is still minus infinity in it
        request = next((one for one in case.requests if one.id == record.request), None)
        if request is None:
            return None
        sizes = np.array([magnitude(before_additions(request, row)) for row in logits])
        try:
            replay = self._stories()[record.request]
            round, plain = replay.rounds[record.round], replay.target.plain
        except (LookupError, ValueError):
            return sizes
        computed = sizes if plain is None else magnitude(plain[round.committed : round.end])
        return np.maximum(sizes, computed) if sizes.shape == computed.shape else sizes

    def _logarithms(self, number: int, name: str, one: Array, other: Array) -> tuple[Array, Array, Array]:
        """Both as rows [R, N] of logarithms, and the magnitude of the logits that each row is of [R]."""
        if name == "candidate_scores":  # each is a sum of its own
            one, other = one[:, None], other[:, None]
        elif one.ndim == 1:
            one, other = one[None], other[None]
        if name == "target_probabilities":
            pairs = list(zip(torch.from_numpy(one), torch.from_numpy(other), strict=True))
            one = np.stack([with_tail(left, right).numpy() for left, right in pairs])
            other = np.stack([with_tail(right, left).numpy() for left, right in pairs])
        left, right = logs(one), logs(other)
        scale = self._scale(number, name)
        if scale is None or scale.shape != (len(left),):
            # the spread of a row's logarithms is that of its logits, at most twice their magnitude: no wider than the bound
            scale = left.max(1) - left.min(1)
        return left, right, scale

    def _scale(self, number: int, name: str) -> Array | None:
        """The scale that the judge uses, from the reference's logits; None where the reference has no rows."""
        record, case = self._trace.header.records[number], self._trace.header.case
        try:
            replay = self._stories()[record.request]
            sampling = case.sampling_of(record.request) or Sampling()
            if name == "proposal_probabilities":
                prefill = record.stage == "prefill"  # when it is over, row M-1 proposes
                end = record.numbers["end"] if prefill else replay.rounds[record.round].end
                return log_scale(replay.draft.logits[end - 1][None])
            if name == "candidate_scores":
                return replay.choices[record.round].sizes
            if name == "draft_probabilities":
                return log_scale(replay.growths[record.round].logits, sampling.temperature)
            round = replay.rounds[record.round]
            return log_scale(replay.target.logits[round.committed : round.end], sampling.temperature)
        except (LookupError, ValueError):
            return None

    def _stories(self) -> dict[str, RequestReplay]:
        """The reference's replay of every request; empty for a trace of other weights, or an inconsistent one."""
        if self._known is None:
            self._known = {}
            if self._trace.header.weights == model_pair(self._trace.header.case.model).digest:
                try:
                    self._known = replay_requests(with_full_prompts(self._trace), "slot_layout")
                except (LookupError, ValueError, RuntimeError):  # the judge calls such a trace unknown
                    self._known = {}
        return self._known


def _rows(name: str, numbers: Array) -> Array:
    """Numbers that share a magnitude [R, N]: of stored rows [n, L, G, D] each layer of each row, else each row."""
    if name.endswith("_kv") and numbers.ndim == 4:
        return numbers.reshape(numbers.shape[0] * numbers.shape[1], -1)
    return numbers.reshape(len(numbers), -1) if numbers.ndim > 1 else numbers.reshape(1, -1)
