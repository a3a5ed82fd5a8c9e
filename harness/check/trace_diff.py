"""Two traces of one case, number for number: which of two engines, or of two runs, did something else?

Not the judge: nothing here says which of the two is right. Records are matched by key (request, round, stage, step).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.records import Key
from eagletwin.harness.core.terminal import count
from eagletwin.harness.core.trace import Trace, on_host
from eagletwin.harness.judge.bounds import bounds_of
from eagletwin.harness.judge.distances import Distances
from eagletwin.harness.judge.model import model_of


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
    """Of how many ranks or stages a trace is."""
    return count(len(trace.processes), "stage" if trace.earlier else "rank")


def _diff_rank(left: Trace, right: Trace, rank: str) -> Comparison:
    ours = {record.key: n for n, record in enumerate(left.header.records)}
    theirs = {record.key: n for n, record in enumerate(right.header.records)}
    found: list[TensorDifference] = []
    compared, largest = 0, 0.0
    both = (bounds_of(trace.header.engine.dtype, left.header.case.model) for trace in (left, right))
    bounds = max(both, key=lambda bounds: bounds.relative)
    distances, latent = Distances(left, right, bounds), model_of(left.header).latent
    unknown = set[str]() if left.header.has_logits and right.header.has_logits else {"target_logits"}  # to an older eagletwin
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
        for name in sorted({*a.tensors, *b.tensors} - unknown):
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
                    one, two = _without_shared(one, two)
                    if torch.equal(one, two):
                        continue
                    share = None
                    if one.is_floating_point():
                        share = distances.shares(ours[key], theirs[key], name, on_host(one), on_host(two))
                    largest = largest if share is None else max(largest, float(share.max()) * bounds.relative)
                    found.append(_difference(f"{where}, {part}", one, two, share))
    return Comparison(found, compared, largest)


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _without_shared(one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
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


def _parts(name: str, one: Tensor, two: Tensor, latent: int) -> list[tuple[str, Tensor, Tensor]]:
    """What of a tensor is compared by itself, under which name: keys and values are not of one magnitude, nor are the two parts
    of a latent row, of which the first is `latent` wide."""
    if not name.endswith("_kv") or one.shape != two.shape:
        return [(name, one, two)]
    if latent:
        parts = ("latent vector", slice(latent)), ("turned key", slice(latent, None))
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
