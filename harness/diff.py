"""Two traces of one case, number for number: what did two engines (or two runs) do differently?

Not the judge: nothing here says which of the two is right. Records are matched by key (request, round, stage, step).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import InputError
from .judge.bounds import bounds_of
from .trace import Trace
from .words import count


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor or number that differs. `bits` only: floats which differ within the judge's bound."""

    where: str
    left: str
    right: str
    bits: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """compared: how many tensors and numbers were looked at; largest: largest relative float difference."""

    differences: list[Difference]
    compared: int
    largest: float

    @property
    def same(self) -> bool:
        return all(difference.bits for difference in self.differences)


def diff(left: Trace, right: Trace) -> Comparison:
    """Compare two traces of the same case, rank by rank. Raises InputError if the cases differ, or the numbers of ranks."""
    if left.header.case.requests != right.header.case.requests or left.header.weights != right.header.weights:
        raise InputError(
            "the two traces are not of the same requests and weights",
            consequence="there is nothing to compare them by",
            remedy="record the same case on both engines",
        )
    if len(left.ranks) != len(right.ranks):
        raise InputError(
            f"one trace is of {count(len(left.ranks), 'rank')}, the other of {len(right.ranks)}",
            consequence="there is nothing to compare them by: each rank holds another part of the rows",
            remedy="record both with the same --tp",
        )
    found: list[Difference] = []
    compared, largest = 0, 0.0
    for rank, (one, two) in enumerate(zip(left.ranks, right.ranks, strict=True)):
        mine = _diff_rank(one, two, f"rank {rank}, " if left.others else "")
        found += mine.differences
        compared, largest = compared + mine.compared, max(largest, mine.largest)
    return Comparison(found, compared, largest)


def _diff_rank(left: Trace, right: Trace, rank: str) -> Comparison:
    ours = {record.key: n for n, record in enumerate(left.header.records)}
    theirs = {record.key: n for n, record in enumerate(right.header.records)}
    found: list[Difference] = []
    compared, largest = 0, 0.0
    bound = max(bounds_of(trace.header.engine.dtype, left.header.case.model).relative for trace in (left, right))
    for key in ours | theirs:
        request, round, stage, step, layer, attempt = key
        where = (
            f"{rank}{stage} step {step}"
            + (f", layer {layer}" if layer else "")
            + (f", attempt {attempt}" if attempt else "")
            + (f" of request {request}, round {round}" if request else "")
        )
        if key not in ours or key not in theirs:
            found.append(_presence(where, key in ours, key in theirs))
            continue
        a, b = left.header.records[ours[key]], right.header.records[theirs[key]]
        for name in sorted(a.numbers.keys() | b.numbers.keys()):
            compared += 1
            if a.numbers.get(name) != b.numbers.get(name):
                found.append(Difference(f"{where}, {name}", str(a.numbers.get(name)), str(b.numbers.get(name)), bits=False))
        for name in sorted({*a.tensors, *b.tensors}):
            if name not in a.tensors or name not in b.tensors:
                compared += 1
                found.append(_presence(f"{where}, {name}", name in a.tensors, name in b.tensors))
                continue
            for part, one, two in _parts(name, left.tensor(ours[key], name), right.tensor(theirs[key], name)):
                compared += 1
                if one.shape != two.shape:
                    shapes = f"shape {tuple(one.shape)}", f"shape {tuple(two.shape)}"
                    found.append(Difference(f"{where}, {part}", *shapes, bits=False))
                elif not torch.equal(one, two):
                    share, difference = _apart(f"{where}, {part}", one, two, bound)
                    largest = max(largest, share)
                    found.append(difference)
    return Comparison(found, compared, largest)


def _parts(name: str, one: Tensor, two: Tensor) -> list[tuple[str, Tensor, Tensor]]:
    """What of a tensor is compared by itself, under which name: keys and values are not of one magnitude."""
    if not name.endswith("_kv") or one.shape != two.shape:
        return [(name, one, two)]
    return list(zip((f"{name} (keys)", f"{name} (values)"), one.unbind(1), two.unbind(1), strict=True))


def _apart(where: str, one: Tensor, two: Tensor, bound: float) -> tuple[float, Difference]:
    """How far two tensors of one shape are apart, relative to the largest number of the first, and where most."""
    apart = (one.double() - two.double()).abs().nan_to_num(torch.inf)
    at = int(apart.flatten().argmax())
    share = float(apart.max() / one.double().abs().max().clamp(min=1e-30)) if one.is_floating_point() else 0.0
    numbers = str(one.flatten()[at].item()), str(two.flatten()[at].item())
    return share, Difference(f"{where}, element {at}", *numbers, bits=one.is_floating_point() and share <= bound)


def comparison_text(result: Comparison, lines: int) -> str:
    """The first `lines` differences, left | right, those beyond the bound first, and the sum."""
    shown = sorted(result.differences, key=lambda difference: difference.bits)[:lines]
    text = [f"{one.where}: {one.left} | {one.right}" + ("  (within the bound)" if one.bits else "") for one in shown]
    hidden = len(result.differences) - lines
    text += [f"… and {hidden} more"] if hidden > 0 else []
    exact = "identical" if not result.differences else f"largest relative float difference {result.largest:.3g}"
    word = "SAME" if result.same else "DIFFERENT"
    return "\n".join([*text, f"{word}: {result.compared} compared, {len(result.differences)} differ; {exact}"])


def _presence(where: str, left: bool, right: bool) -> Difference:
    left_word, right_word = ("recorded" if there else "absent" for there in (left, right))
    return Difference(where, left_word, right_word, bits=False)
