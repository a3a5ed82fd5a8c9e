"""What was copied between the device and a hierarchical cache's pools on the host: whose rows are in which slot afterwards.

A copy's record has the slots that the prefix cache's tree has for both ends. What the device's slots held when it was asked for
is what the host's must hold, and the other way round: whatever the copy itself did. Rows that it left out, or took to other
slots, are then other rows than are known to be there.
"""

from collections.abc import MutableMapping
from typing import TypeVar

from eagletwin.harness.core.trace import Trace

_What = TypeVar("_What")


def pairs_of(trace: Trace, number: int, prefix: str = "") -> list[tuple[int, int]]:
    """(slot of the device, slot of the host) of a copy; nothing of a space of slots that it does not touch.

    prefix: of the names of the space's tensors"""
    if f"{prefix}device" not in trace.header.records[number].tensors:
        return []
    return list(zip(*(trace.integers(number, f"{prefix}{end}") for end in ("device", "host")), strict=True))


def carry(
    pairs: list[tuple[int, int]], restore: bool, device: MutableMapping[int, _What], host: MutableMapping[int, _What]
) -> None:
    """Take what is known of the slots at one end to those at the other. Of one of which nothing is known, nothing is left."""
    for at_device, at_host in pairs:
        origin, target, source, slot = (host, device, at_host, at_device) if restore else (device, host, at_device, at_host)
        if source in origin:
            target[slot] = origin[source]
        else:
            target.pop(slot, None)


def restored(trace: Trace) -> dict[tuple[str, int], int | None]:
    """(request, iteration) -> how many of its rows came back from the host. None: so did rows that layers with a window lacked,
    and SGLang counts all rows as the host's that were of no use without those, where they are on the device, too."""
    found: dict[tuple[str, int], int | None] = {}
    for number, record in enumerate(trace.header.records):
        if record.stage == "copy" and record.numbers["restore"]:
            key, count = (record.request, record.iteration), len(trace.array(number, "device"))
            before = found.get(key, 0)
            found[key] = None if before is None or "window_device" in record.tensors else before + count
    return found
