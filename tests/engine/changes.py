"""Ways to change one tensor of a recorded trace, and to find or leave out records: what tests of the judge plant."""

from collections.abc import Callable

import msgspec
import torch
from torch import Tensor

from eagletwin.harness.core.records import Record
from eagletwin.harness.core.trace import Trace

Change = Callable[[Tensor], Tensor]

# What the names of rules begin with that a chain of a single layer never reaches, if nothing befalls it
IDLE_IN_CHAINS = (
    *("engine.", "kernel.", "race.", "ranks.", "schedule."),
    *("tree.parents", "tree.tokens", "commit.", "window.", "draft.runner", "target.selection", "draft.selection"),
)


def bump(tensor: Tensor) -> Tensor:
    """The last number is one higher."""
    changed = tensor.clone()
    changed.view(-1)[-1] += 1
    return changed


def nudge(tensor: Tensor) -> Tensor:
    """The largest number is a thousandth off: ten bounds."""
    changed = tensor.clone()
    at = int(changed.abs().flatten().argmax())
    changed.view(-1)[at] *= 1.001
    return changed


def percent(tensor: Tensor) -> Tensor:
    """The largest number is a hundredth off. The bound of a log-probability is that of two logits, so wider."""
    changed = tensor.clone()
    changed.view(-1)[int(changed.abs().flatten().argmax())] *= 1.01
    return changed


def nan(tensor: Tensor) -> Tensor:
    changed = tensor.clone()
    changed.view(-1)[0] = torch.nan
    return changed


def first(tensor: Tensor) -> Tensor:
    """The first number is off by as much as the largest one is large."""
    changed = tensor.clone()
    changed.view(-1)[0] += changed.abs().max()
    return changed


def of_keys(change: Change) -> Change:
    """Of KV rows [n, 2, L, G, D]: the change of their keys."""
    return lambda tensor: torch.stack([change(tensor[:, 0].contiguous()), tensor[:, 1]], 1)


def of_values(change: Change) -> Change:
    return lambda tensor: torch.stack([tensor[:, 0], change(tensor[:, 1].contiguous())], 1)


def flip(tensor: Tensor) -> Tensor:
    """One node sees another that is not its ancestor."""
    changed = tensor.clone()
    changed[0, -1] = True
    return changed


def shorten(tensor: Tensor) -> Tensor:
    return tensor[:-1].clone()


def lengthen(tensor: Tensor) -> Tensor:
    """The last row is there twice."""
    return torch.cat([tensor, tensor[-1:]])


def last_of(trace: Trace, stage: str, tensor: str = "") -> int:
    """The last record of a stage that has anything to change in `tensor`."""
    if tensor:
        return every(trace, stage, tensor)[-1]
    return max(number for number, record in enumerate(trace.header.records) if record.stage == stage)


def without(trace: Trace, gone: Callable[[int, Record], bool]) -> Trace:
    """The trace without the records for which gone(number, record) holds."""
    kept = [n for n, record in enumerate(trace.header.records) if not gone(n, record)]
    records = tuple(trace.header.records[n] for n in kept)
    tensors = {f"{at}.{name}": trace.tensor(n, name) for at, n in enumerate(kept) for name in trace.header.records[n].tensors}
    return Trace(msgspec.structs.replace(trace.header, records=records), tensors)


def every(trace: Trace, stage: str, tensor: str) -> list[int]:
    """All records of a stage that have anything to change in `tensor`."""
    of_stage = [number for number, record in enumerate(trace.header.records) if record.stage == stage]
    return [n for n in of_stage if tensor in trace.header.records[n].tensors and trace.tensor(n, tensor).numel()]


def changed(trace: Trace, tensors: dict[str, Tensor]) -> Trace:
    """The trace with these tensors, by "{record number}.{name}", in place of its own."""
    return Trace(trace.header, {**trace.tensors, **tensors})
