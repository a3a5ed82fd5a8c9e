"""Streams without a clock: an access that no wait orders after what another stream wrote is a race, whenever it runs.

SGLang's overlap scheduler prepares batches on one stream, runs them on another, and takes results to the host on a third. On a
CPU all of them run in the order of the program. So each stream, event and the host has a vector clock here: how far of each
stream it knows that it is done. A read must know of the write before it; a write to a buffer that batches share must know of
the reads before it, too. What a graph's own results are read by is left out: SGLang relies on a copy that begins at once.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from eagletwin.harness.engines import triton_cpu
from eagletwin.harness.engines.inside import blame
from eagletwin.harness.engines.inside.blame import hand_on

from . import tape

Clock = dict[int, int]  # stream -> how many of its operations are done


class Race(triton_cpu.KernelViolation):
    """An access that no wait orders after one of another stream."""


races: list[Race] = []  # of this case


def _learn(clock: Clock, other: Clock) -> None:
    for stream, done in other.items():
        clock[stream] = max(clock.get(stream, 0), done)


class LogicalStream:
    """Stands in for a stream of the device."""

    names: dict[int, str] = {}  # noqa: RUF012

    def __init__(self, *_: Any, **__: Any) -> None:
        self.number = len(LogicalStream.names)
        LogicalStream.names[self.number] = f"stream {self.number}"
        self.knows: Clock = {self.number: 0}

    def wait_stream(self, other: LogicalStream) -> None:
        _learn(self.knows, other.knows)

    def wait_event(self, event: LogicalEvent) -> None:
        _learn(self.knows, event.knows)

    def record_event(self, event: LogicalEvent | None = None) -> LogicalEvent:
        event = event or LogicalEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        _learn(_host, self.knows)

    def query(self) -> bool:
        return True


class LogicalEvent:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.knows: Clock = {}

    def record(self, stream: LogicalStream | None = None) -> None:
        self.knows = dict((stream or current_stream()).knows)

    def wait(self, stream: LogicalStream | None = None) -> None:
        _learn((stream or current_stream()).knows, self.knows)

    def synchronize(self) -> None:
        _learn(_host, self.knows)

    def query(self) -> bool:
        return True


class StreamContext:
    def __init__(self, stream: LogicalStream | None) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        if self._stream is not None:
            _entered.append(self._stream)

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            _entered.pop()


_host: Clock = {}
_entered: list[LogicalStream] = [LogicalStream()]


def current_stream(_device: Any = None) -> LogicalStream:
    return _entered[-1]


def install(shims: list[str]) -> None:
    """Before a scheduler is built."""
    for name, value in (
        ("Stream", LogicalStream),
        ("Event", LogicalEvent),
        ("StreamContext", StreamContext),
        ("stream", StreamContext),
    ):
        setattr(torch.cpu, name, value)
    torch.cpu.current_stream = current_stream  # type: ignore[assignment]
    shims.append("torch.cpu.Stream, Event, StreamContext, stream, current_stream: they note what waits for what")


class _State:
    __slots__ = ("pinned", "reads", "written")

    def __init__(self, written: tuple[int, int] | None = None) -> None:
        self.written = written  # (stream, its operation)
        self.reads: Clock = {}
        self.pinned = False  # on the host, where nothing waits for the device by itself


class StreamWatch(tape.DispatchMode):
    """The accesses of one case. shared: the names of buffers that batches share, by address; runners: of models, each of which
    runs as one operation."""

    def __init__(self, shared: dict[int, str], runners: Sequence[Any] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shared, self._runners, self._wrapped = shared, runners, contextlib.ExitStack()
        self._states: dict[int, _State] = {}
        self._alive: list[Any] = []  # memory that is not given to another tensor meanwhile
        self._host = tape.noting_waits(self.host_reads, _counts)

    def __enter__(self) -> StreamWatch:
        tape.watcher = self
        self._host.__enter__()
        for runner in self._runners:
            pool = tape.tensors(vars(runner.token_to_kv_pool))
            self._wrapped.enter_context(
                patch.object(runner.model, "forward", partial(self._run_model, runner.model.forward, pool))
            )
        return super().__enter__()  # type: ignore[no-any-return,no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._wrapped.close()
        self._host.__exit__(*error)
        tape.watcher = None

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = hand_on(function, *args, **kwargs)
        if not _counts():
            return result
        given = tape.tensors((args, kwargs))
        now = self.note(given, tape.writes_to(function, args, kwargs))
        for state in self._made(given, tape.tensors(result), now):
            state.pinned = function is torch.ops.aten.clone.default and _is_copied_to_host()
        return result

    def _made(self, given: Sequence[Tensor], made: Sequence[Tensor], now: int) -> list[_State]:
        """The states of memory that this operation made."""
        known, states = {tensor.untyped_storage().data_ptr() for tensor in given}, []
        for tensor in made:
            storage = tensor.untyped_storage()
            place = storage.data_ptr()
            if place and place not in known:  # an empty one lies nowhere
                self._alive.append(storage)
                self._states[place] = _State((current_stream().number, now))
                states.append(self._states[place])
        return states

    def _run_model(self, call: Any, pool: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        """A forward of a model: what it is given is read, and its pool is written. Its own values stay on its stream; launches
        of kernels are seen one by one."""
        parts = [part for one in (*args, *kwargs.values()) for part in (one, getattr(one, "spec_info", None))]
        given = tape.tensors([part if isinstance(part, Tensor) else getattr(part, "__dict__", None) for part in parts])
        now = self.note([*given, *pool], pool)
        with torch.utils._python_dispatch._disable_current_modes():
            result = hand_on(call, *args, **kwargs)
        self._made(given, tape.tensors(getattr(result, "__dict__", result)), now)
        return result

    def note(self, given: Sequence[Tensor], written: Sequence[Tensor]) -> int:
        """An operation of the current stream; returns its number. Raises Race for an access that nothing orders."""
        stream = current_stream()
        _learn(stream.knows, _host)
        stream.knows[stream.number] = now = stream.knows[stream.number] + 1
        inputs = {tensor.untyped_storage().data_ptr(): tensor for tensor in given}
        changed = {tensor.untyped_storage().data_ptr() for tensor in written}
        inputs.pop(0, None)  # empty ones lie nowhere
        for place, tensor in inputs.items():
            state = self._states.get(place) or self._states.setdefault(place, _State())
            self._check(stream.knows, stream.number, state.written, tensor)
            for other, done in state.reads.items() if place in changed and place in self._shared else ():
                self._check(stream.knows, stream.number, (other, done), tensor)
            state.reads[stream.number] = now
            if place in changed:
                state.written, state.reads = (stream.number, now), {}
        return now

    def host_reads(self, tensor: Tensor, _how: str) -> None:
        """As `.tolist()` does: of the device's memory it waits for the current stream, of its own for nothing."""
        state = self._states.get(tensor.untyped_storage().data_ptr())
        if state is None or not state.pinned:
            _learn(_host, current_stream().knows)
        else:
            self._check(_host, -1, state.written, tensor)

    def _check(self, knows: Clock, own: int, before: tuple[int, int] | None, tensor: Tensor) -> None:
        if before is None or before[0] == own or knows.get(before[0], 0) >= before[1]:
            return
        place = tensor.untyped_storage().data_ptr()
        name = self._shared.get(place, f"a {str(tensor.dtype)[6:]} tensor of shape {tuple(tensor.shape)}")
        who = "the host" if own < 0 else f"the {LogicalStream.names[own]} stream"
        detail = f"{who} uses {name}, and does not wait for the {LogicalStream.names[before[0]]} stream, which used it before"
        race = Race(detail, kernel=f"{who} after the {LogicalStream.names[before[0]]} stream")
        races.append(race)
        raise race


def _counts() -> bool:
    return not blame.in_own_code and not tape.capturing()


def _is_copied_to_host() -> bool:
    """Whether SGLang's async_d2h is among the callers."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_name != "async_d2h":
        frame = frame.f_back
    return frame is not None


def watch(scheduler: Any) -> contextlib.AbstractContextManager[Any]:
    """While a case runs: with overlap, the accesses of its streams."""
    if not isinstance(getattr(scheduler, "forward_stream", None), LogicalStream) or not scheduler.enable_overlap:
        return contextlib.nullcontext()
    from ..taps.speculation import draft_runners

    for word in ("schedule", "forward", "copy"):
        if isinstance(stream := getattr(scheduler, f"{word}_stream", None), LogicalStream):  # older releases lack one
            LogicalStream.names[stream.number] = word
    named = {f"the relay's {name}": value for name, value in vars(scheduler.future_map).items()}
    named["req_to_token"] = scheduler.req_to_token_pool.req_to_token
    shared = {one.untyped_storage().data_ptr(): name for name, one in named.items() if isinstance(one, Tensor)}
    return StreamWatch(shared, (scheduler.tp_worker.model_runner, *draft_runners(scheduler)))


def watch_launches() -> None:
    """Launches of Triton kernels are operations of the current stream, too. Once the fast runtime is installed."""
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run

    def run_and_note(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if tape.watcher is not None and not blame.in_own_code and not warmup:
            tape.watcher.note(tape.tensors((args, kwargs)), stored_to(self, args, kwargs))
        with blame.own_code():
            return hand_on(run, self, *args, grid=grid, warmup=warmup, **kwargs)

    InterpretedFunction.run = run_and_note


def stored_to(kernel: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that a kernel stores to, by the names in its source; none of one that our runtime cannot compile."""
    stored = triton_cpu.stored_names(kernel.fn)
    given = (*zip(kernel.arg_names, args, strict=False), *kwargs.items())
    return tape.tensors([value for name, value in given if name in stored])
