"""Streams, events and sgl_kernel's copy between device and host, for a hierarchical cache whose device is a CPU.

On a GPU a copy of the hierarchical cache runs in a stream of its own, at any time until somebody waits for its event. Here it
runs as late as that: nothing is copied before an event behind it is waited for, or asked about a second time. A wait that is
missing, or rows that are given away while they are still to be copied, then show in every run and not by chance.

All that is computed on a CPU is computed at once, in the order of the calls: that is the stream `NOW`, which waits for the
others and is never waited for. Only `transfer_kv_direct` puts its work off. Written from what these must do (torch.cuda's
documentation, the call sites of releases).
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from eagletwin.harness.engines.inside.blame import demand


class CopyStream:
    """Work that is to be done in its order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self.given = 0  # pieces of work, since the process began
        self.done = 0

    def put(self, work: Callable[[], None]) -> None:
        self._waiting.append(work)
        self.given += 1

    def until(self, number: int) -> None:
        """Do what was put before this number."""
        while self.done < number:
            self._waiting.popleft()()
            self.done += 1

    def synchronize(self) -> None:
        self.until(self.given)

    def wait_event(self, event: "CopyEvent") -> None:
        if self is NOW:
            event.synchronize()
        else:
            stream, number = event.place
            self.put(lambda: stream.until(number))

    def wait_stream(self, other: Any) -> None:
        """Streams of others do their work at once."""
        if isinstance(other, CopyStream):
            other.record_event().wait(self)

    def record_event(self, event: "CopyEvent | None" = None) -> "CopyEvent":
        event = event or CopyEvent()
        event.record(self)
        return event


class CopyEvent:
    """A place in a stream; one that was never recorded is behind everything."""

    def __init__(self) -> None:
        self._stream, self._number, self._asked = NOW, 0, False

    def record(self, stream: CopyStream | None = None) -> None:
        self._stream = stream or current_stream()
        self._number, self._asked = self._stream.given, False

    @property
    def place(self) -> tuple[CopyStream, int]:
        """Where it is recorded now; it may be recorded anew before somebody who waits has come so far."""
        return self._stream, self._number

    def query(self) -> bool:
        """Whether all before it is done. The first to ask is told that it is not; when it asks again, it is."""
        if self._stream.done < self._number and not self._asked:
            self._asked = True
            return False
        self.synchronize()
        return True

    def synchronize(self) -> None:
        self._stream.until(self._number)

    def wait(self, stream: CopyStream | None = None) -> None:
        (stream or current_stream()).wait_event(self)


Stream, Event = CopyStream, CopyEvent  # by the names that torch.cuda has for them
NOW = CopyStream()
_current = [NOW]


def current_stream(*_: Any) -> CopyStream:
    return _current[-1]


@contextlib.contextmanager
def stream(chosen: Any) -> Iterator[None]:
    _current.append(chosen if isinstance(chosen, CopyStream) else NOW)
    try:
        yield
    finally:
        _current.pop()


def transfer_kv_direct(
    src_layers: Sequence[Tensor],
    dst_layers: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,  # noqa: ARG001  the caller's signature: it copies whole pages, and here each of their rows
) -> None:
    """Copy rows `src_indices` [n] of each source layer to rows `dst_indices` [n] of its destination. The C++ reads the indices
    when it is called, and the rows when its stream has come so far. Raises BadArguments for rows that a layer does not have."""
    sizes = f"{len(src_layers)} layers to {len(dst_layers)}, {len(src_indices)} rows to {len(dst_indices)}"
    demand(len(src_layers) == len(dst_layers) and len(src_indices) == len(dst_indices), sizes)
    origin, target = src_indices.clone(), dst_indices.clone()
    pairs = list(zip(src_layers, dst_layers, strict=True))
    for source, destination in pairs:
        demand(source.shape[1:] == destination.shape[1:], f"rows {[*source.shape[1:]]} to {[*destination.shape[1:]]}")
        for layer, rows in ((source, origin), (destination, target)):
            inside = bool(((rows >= 0) & (rows < len(layer))).all())
            demand(inside, f"rows {rows.tolist()} of a layer that has {len(layer)}")

    def copy() -> None:
        for source, destination in pairs:
            destination[target] = source[origin]

    work_of = current_stream()
    if work_of is NOW:
        copy()
    else:
        work_of.put(copy)
