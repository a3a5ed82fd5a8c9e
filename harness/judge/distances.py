"""How far the numbers of one trace are from those of another, as shares of the judge's bound. Used by `diff`.

The judge compares a trace with the reference; here one trace stands in the reference's place. Rows, logarithms and magnitudes
are those of the judge, so a number that is further off than the bound is so for both. Where two engines are off from the
reference in opposite directions, each within the bound, they may be up to two bounds apart: that is a difference.
"""

import numpy as np
import torch
from torch import Tensor

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.case import Sampling
from eagletwin.harness.core.records import Record
from eagletwin.harness.core.trace import Trace, on_host
from eagletwin.harness.families.weights import model_pair
from eagletwin.reference.cuts import rounding_of

from .bounds import Bounds, log_scale, logs, magnitude, quiet_arithmetic, with_tail
from .replay import RequestReplay, replay_requests
from .request_logits import before_additions
from .rules.sessions import as_asked

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
        sampling = self._trace.header.case.sampled(self._trace.header.records[number].request) or Sampling()
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
            sampling = case.sampled(record.request) or Sampling()
            if name == "proposal_probabilities":
                return log_scale(replay.draft.logits[_committed(record, replay) - 1][None])
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
                    self._known = replay_requests(as_asked(self._trace), "slot_layout")
                except (LookupError, ValueError, RuntimeError):  # the judge calls such a trace unknown
                    self._known = {}
        return self._known


def _committed(record: Record, replay: RequestReplay) -> int:
    """M when an extend is over: row M-1 proposes."""
    return record.numbers["end"] if record.stage == "prefill" else replay.rounds[record.round].end


def _rows(name: str, numbers: Array) -> Array:
    """Numbers that share a magnitude [R, N]: of stored rows [n, L, G, D] each layer of each row, else each row."""
    if name.endswith("_kv") and numbers.ndim == 4:
        return numbers.reshape(numbers.shape[0] * numbers.shape[1], -1)
    return numbers.reshape(len(numbers), -1) if numbers.ndim > 1 else numbers.reshape(1, -1)
