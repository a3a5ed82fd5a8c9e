"""Healthy traces changed in one place, as a fault of a worker or an end of its process would have left them."""

from collections import Counter
from random import Random
from typing import Literal

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from eagletwin.harness.core.records import Ending
from eagletwin.harness.core.trace import Trace

_OUTSIDE = 1 << 20  # of any vocabulary, tree, table and pool here
How = Literal["next", "outside", "alike", "cut"]


class Change(Struct, frozen=True):
    """One place of a trace.

    record  its number; name: of a tensor or a number of it
    how     `next`: one number is another one, of floats by a hundredth; `outside`: an integer that nothing has; `alike`: the
            first numbers are those of the record of its kind before it; `cut`: the run ended when the record was to come
    """

    record: int
    name: str
    how: How


class DrawnChange:
    """Draws changes, of each stage, name and way those first of which the fewest were drawn."""

    def __init__(self, seed: int) -> None:
        self._random, self._had = Random(seed), Counter[tuple[str, str, How]]()

    def of(self, trace: Trace, most: int) -> list[Change]:
        """Up to `most` changes of a trace."""
        by_kind: dict[tuple[str, str, How], list[Change]] = {}
        for number, record in enumerate(trace.header.records):
            names = [name for name in record.tensors if trace.tensor(number, name).numel()]
            for name in (*names, *record.numbers):
                for how in _ways(trace, number, name):
                    by_kind.setdefault((record.stage, name, how), []).append(Change(number, name, how))
            by_kind.setdefault((record.stage, "", "cut"), []).append(Change(number, "", "cut"))
        kinds = self._random.sample(sorted(by_kind), len(by_kind))
        kinds.sort(key=lambda kind: self._had[kind])
        self._had.update(kinds[:most])
        return [self._random.choice(by_kind[kind]) for kind in kinds[:most]]


def _ways(trace: Trace, number: int, name: str) -> list[How]:
    if name not in trace.header.records[number].tensors:
        return ["next"]
    floats = trace.tensor(number, name).is_floating_point()
    alike: list[How] = ["alike"] if _before(trace, number, name) is not None else []
    return ["next", *alike] if floats else ["next", "outside", *alike]


def _before(trace: Trace, number: int, name: str) -> Tensor | None:
    """The tensor of this name in the record of this stage before it, if its shape is the same."""
    own = trace.header.records[number]
    for other in range(number - 1, -1, -1):
        record = trace.header.records[other]
        if record.stage == own.stage and name in record.tensors:
            found = trace.tensor(other, name)
            return found if found.shape == trace.tensor(number, name).shape else None
    return None


def changed(trace: Trace, change: Change) -> Trace:
    """The trace with the change."""
    header, number, name = trace.header, change.record, change.name
    if change.how == "cut":
        ending = Ending(kind="crashed", detail="the trace was cut", where=header.records[number].stage)
        return Trace(replace(header, records=header.records[:number], ending=ending), trace.tensors, trace.others)
    own = header.records[number]
    if name not in own.tensors:
        before = own.numbers[name]
        records = [*header.records]
        records[number] = replace(own, numbers=own.numbers | {name: 1 - before if before in (0, 1) else before + 1})
        return Trace(replace(header, records=tuple(records)), trace.tensors, trace.others)
    tensor = trace.tensor(number, name).clone()
    _change(tensor.view(-1), trace, change)
    return Trace(header, {**trace.tensors, f"{number}.{name}": tensor}, trace.others)


def _change(flat: Tensor, trace: Trace, change: Change) -> None:
    at = int(flat.abs().argmax()) if flat.is_floating_point() else flat.numel() // 2
    if change.how == "alike":
        before = _before(trace, change.record, change.name)
        assert before is not None
        count = Random(f"{change.record} {change.name}").randint(1, max(1, flat.numel() - 1))
        flat[:count] = before.reshape(-1)[:count]
    elif flat.dtype == torch.bool:
        flat[at] = ~flat[at]
    elif change.how == "outside":
        flat[at] = min(_OUTSIDE, torch.iinfo(flat.dtype).max)
    else:
        flat[at] = flat[at] * 1.01 if flat.is_floating_point() else flat[at] + 1
