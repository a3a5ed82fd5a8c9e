"""CUDA graphs on CPU tensors: a tape of what runs while a graph is captured, and its replay on the same memory.

A node is an operation of torch below Python (TorchDispatchMode) that writes or makes a tensor, a launch of a Triton kernel, or
what is one kernel on a GPU (`fused`, `opaque`), with each Python scalar as it was. Views are no nodes: their memory is. No
other Python of SGLang runs in a replay. What made a tensor runs again, and its result is copied into it, for its holders.

As CUDA does, a capture refuses what waits for the device (`.item()`, `.cpu()`, boolean masks, nonzero), of tensors that are
not the host's. It runs operations that CUDA only records, so all memory that it wrote is restored at its end.

Memory: all graphs share a pool, as SGLang's do. Memory that a graph has freed when the next one is captured is the next one's.
A replay of a graph may therefore write over all that later graphs gave: it is poisoned here. The allocator's own choice may be
kinder. Memory of `torch.empty` is poisoned before each replay.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from eagletwin.harness.engines.inside.blame import CaptureError, hand_on, own_code

_WAITS = frozenset({"item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__"})
_EMPTY = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
_RESHAPE_IN_PLACE = ("set_", "resize_", "resize_as_", "t_", "transpose_", "squeeze_", "unsqueeze_")
_INDEX = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")
_WAITING = ("item", "_local_scalar_dense", "is_nonzero", "equal")
_VIEWS = ("_unsafe_view",)  # and operations whose schema says it
_LIFTS = ("lift_fresh", "lift_fresh_copy")
_REFUSED = (*_WAITING, *_LIFTS, *_INDEX, *_RESHAPE_IN_PLACE, "repeat_interleave")
_REFUSED_TAGS = frozenset((torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output))
_BELOW = (str(Path(__file__).parents[3]), *torch.__path__, *triton.__path__)  # frames that are not SGLang's
_NOWHERE = ("", 0, "")
_LEAVES = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device))  # of arguments, most of them
_TREES = (list, tuple, dict)
_MEETS = "c10d"  # the namespace of collectives


class Watcher(Protocol):
    def note(self, given: Sequence[Tensor], written: Sequence[Tensor]) -> object: ...


watcher: Watcher | None = None  # sees which memory each replay reads and writes


class TapeNode(NamedTuple):
    """run: in a replay, on the memory of the capture. made: tensors that it gives; given, written: what it reads and writes
    beside these; where: in SGLang's code, for an error."""

    run: Callable[[], None]
    made: tuple[Tensor, ...] = ()
    where: tuple[str, int, str] = _NOWHERE
    given: tuple[Tensor, ...] = ()
    written: tuple[Tensor, ...] = ()


class Tape:
    """Stands in for torch.cuda.CUDAGraph."""

    now: ClassVar[Tape | None] = None  # the one that is captured
    pool_order: ClassVar[list[Tape]] = []  # as they were captured

    def __init__(self, *_: Any, **__: Any) -> None:
        self.nodes: list[TapeNode] = []
        self._holds = self._ended = False  # whether its results are in memory; whether its capture is over

    def capture_begin(self, *_: Any, **__: Any) -> None:
        if Tape.now is not None:
            raise CaptureError("the capture of another graph", "one stream captures one graph at a time")
        self._modes = noting_waits(_refuse_wait, _is_recording), _Recorder(self)
        for mode in self._modes:
            mode.__enter__()
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # address -> the memory, and a copy from before it was written
        self._own: set[int] = set()  # addresses of memory that this capture made
        Tape.now = self

    def capture_end(self) -> None:
        Tape.now = None
        for mode in reversed(self._modes):
            mode.__exit__(None, None, None)
        with torch.inference_mode(), recording_off():
            for memory, before in self._before.values():
                memory.copy_(before)
            self._forget()
        self._before.clear()
        self._accesses = tuple(_by_address([one for node in self.nodes for one in of(node)]) for of in (_given, _written))
        Tape.pool_order.append(self)
        self._ended = True

    def add(self, run: Callable[[], None], made: Sequence[Tensor], given: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        self.nodes.append(TapeNode(run, tuple(made), _caller(), tuple(given), tuple(written)))
        self._own.update(tensor.untyped_storage().data_ptr() for tensor in made)

    def keep(self, tree: Any) -> None:
        """What lies in the memory of these tensors is about to be written: it is put back at the end."""
        for tensor in tensors(tree):
            storage = tensor.untyped_storage()
            place = storage.data_ptr()
            if place and place not in self._before and place not in self._own:
                memory = torch.empty(0, dtype=torch.uint8).set_(storage)
                self._before[place] = memory, memory.clone()

    def replay(self) -> None:
        if Tape.now is not None:
            raise CaptureError("the replay of a graph", "graphs are launched on another stream")
        if not self._ended:
            raise RuntimeError("replay() of a CUDA graph that was not captured")
        if watcher is not None:
            watcher.note(*self._accesses)
        with torch.inference_mode(), recording_off(), own_code():  # the watcher has seen all of it
            for later in Tape.pool_order[Tape.pool_order.index(self) + 1 :]:
                later._forget()
            for node in self.nodes:
                try:
                    node.run()
                except Exception as error:
                    if node.where == _NOWHERE:  # a probe
                        raise
                    _raise_at(node.where, error)
        self._holds = True

    def _forget(self) -> None:
        """Another graph may have written over what this one gave."""
        if self._holds or not self._ended:
            for node in self.nodes:
                poison(node.made)
        self._holds = False

    def reset(self) -> None:
        self.nodes.clear()
        self._ended = self._holds = False
        if self in Tape.pool_order:
            Tape.pool_order.remove(self)

    def pool(self) -> tuple[int, int]:
        return (0, 1)


class graph:  # noqa: N801  stands in for torch.cuda.graph
    def __init__(self, cuda_graph: Tape, *_: Any, **__: Any) -> None:
        self._tape = cuda_graph

    def __enter__(self) -> None:
        self._tape.capture_begin()

    def __exit__(self, *error: object) -> None:
        self._tape.capture_end()


_given, _written = attrgetter("given"), attrgetter("written")


def _by_address(of: Sequence[Tensor]) -> list[Tensor]:
    """One tensor of each memory."""
    return [*{tensor.untyped_storage().data_ptr(): tensor for tensor in of}.values()]


_off = False  # whether what runs is not recorded


def capturing() -> bool:
    return Tape.now is not None


class recording_off:  # noqa: N801  a class, because thousands of nodes enter it
    """What runs in it is neither recorded nor refused."""

    def __enter__(self) -> None:
        global _off
        self._before, _off = _off, True
        guard: Any = torch._C._DisableTorchDispatch
        self._no_modes = guard()
        self._no_modes.__enter__()

    def __exit__(self, *error: Any) -> None:
        global _off
        self._no_modes.__exit__(*error)
        _off = self._before


def poison(made: tuple[Tensor, ...]) -> None:
    for tensor in made:
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
        elif tensor.dtype is not torch.bool:
            tensor.fill_(torch.iinfo(tensor.dtype).max // 3)


def probe(look: Callable[..., None], *tensors: Tensor | None) -> None:
    """`look` is called with these tensors at this point of each replay. A real graph has no such node, so it writes nothing."""
    if Tape.now is not None:
        with recording_off():
            frozen = [None if tensor is None else tensor.detach() for tensor in tensors]
            Tape.now.nodes.append(TapeNode(functools.partial(look, *frozen)))


def opaque(function: Callable[..., Any]) -> Callable[..., Any]:
    """A stand-in of a CUDA operation, which may count on the host: one node, whatever it does inside."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if Tape.now is None:
            return hand_on(function, *args, **kwargs)
        with recording_off():
            Tape.now.keep((args, kwargs))
            reads: list[Tensor] = []
            frozen, named = _frozen((args, kwargs), reads)
            result = hand_on(function, *args, **kwargs)
            made, run = _to_make(function, frozen, named, reads, result)
            Tape.now.add(run, made, reads, reads)
        return result

    return call


def fused(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a module in torch, in the place of one kernel: one node, whatever it does inside. It writes to no tensor but
    those of its arguments that it returns. The module's numbers are baked in, and its tensors are their memory, as in a launch.
    As a launch, it does not run while a graph is captured, once it is known what it gives for such numbers and shapes."""
    known: dict[Any, tuple[Sequence[Tensor], Any]] = {}  # numbers and shapes -> what it was given, and gave

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if Tape.now is None or _off:
            return hand_on(method, self, *args, **kwargs)
        with recording_off():
            reads: list[Tensor] = []
            module = object.__new__(type(self))
            vars(module).update(_frozen(vars(self), reads))
            frozen, named = (module, *_frozen(args, reads)), _frozen(kwargs, reads)
            numbers = _numbers((vars(module), frozen[1:], named))
            if numbers in known:
                result = _anew(*known[numbers], reads)
            else:
                Tape.now.keep((frozen[1:], named))
                result = hand_on(method, *frozen, **named)
                if _follows_from_shapes(result, reads):
                    known[numbers] = reads, result
            made, run = _to_make(method, frozen, named, reads, result)
            Tape.now.add(run, made, reads, [one for one in tensors(result) if any(one is other for other in reads)])
        return result

    return call


def _numbers(tree: Any) -> Any:
    """All that the shapes of a kernel's results depend on."""
    if type(tree) in _LEAVES:
        return tree
    if isinstance(tree, Tensor):
        return tree.dtype, tree.shape, tree.stride()
    if isinstance(tree, dict):
        return tuple((name, _numbers(part)) for name, part in tree.items())
    return tuple(map(_numbers, tree)) if isinstance(tree, _TREES) else None


def _follows_from_shapes(result: Any, reads: Sequence[Tensor]) -> bool:
    """Whether each tensor of it is one of those that were read, or floats in memory of their own."""
    made = [one for one in tensors(result) if all(one is not other for other in reads)]
    places = [one.untyped_storage().data_ptr() for one in (*reads, *made)]
    alone = all(one.untyped_storage().nbytes() == one.nbytes and places.count(one.data_ptr()) == 1 for one in made)
    return alone and all(one.is_floating_point() for one in made)


def _anew(reads: Sequence[Tensor], result: Any, now: Sequence[Tensor]) -> Any:
    """A result of these shapes. What was one of `reads` is the same one of those that are read now."""
    read = {id(one): new for one, new in zip(reads, now, strict=True)}
    return _map(lambda one: read[id(one)] if id(one) in read else torch.empty_like(one), result)


def launch(run: Callable[..., Any], kernel: Any, grid: Any, args: Any, kwargs: Any, written: Sequence[Tensor]) -> None:
    """A launch of a Triton kernel on a grid of numbers, while a graph is captured. A replay runs it by whatever runs kernels
    then. written: what it stores to; none, where that is unknown.

    A capture of CUDA runs nothing. Here a kernel runs if it may store integers: torch's operations index by them."""
    assert Tape.now is not None
    with recording_off():
        reads: list[Tensor] = []
        frozen, named = widened(_frozen((args, kwargs), reads))
        run_again = functools.partial(hand_on, grid=grid, warmup=False, **named)
        if not written or not all(tensor.is_floating_point() for tensor in written):
            Tape.now.keep((frozen, named))
            run_again(run, kernel, *frozen)
    Tape.now.add(lambda: run_again(kernel.run, *frozen), (), reads, written)


def widened(tree: Any) -> Any:
    """Each slice of a buffer as long as the rest of it: a graph has addresses and no lengths, and a launch that is replayed may
    read on where it was captured with a shorter slice."""

    def widen(value: Tensor) -> Tensor:
        if not value.is_contiguous():
            return value
        rest = value.untyped_storage().nbytes() // value.element_size() - value.storage_offset()
        return value if rest <= value.numel() else value.as_strided((rest,), (1,))

    return _map(widen, tree)


@contextlib.contextmanager
def noting_waits(note: Callable[[Tensor, str], None], counts: Callable[[], bool]) -> Iterator[None]:
    """While it lasts: where it `counts`, `note` is called with each tensor of the device that the host is about to read, and
    how. Methods are replaced: a TorchFunctionMode would see each call of torch."""

    def noted(name: str, method: Any) -> Any:
        def call(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            if counts() and not _is_host(self, sys._getframe(1)):
                note(self, name)
            return hand_on(method, self, *args, **kwargs)

        return call

    own = {name: vars(Tensor).get(name) for name in _WAITS}
    for name in _WAITS:
        setattr(Tensor, name, noted(name, getattr(Tensor, name)))
    try:
        yield
    finally:
        for name, method in own.items():
            if method is None:
                delattr(Tensor, name)
            else:
                setattr(Tensor, name, method)


def _refuse_wait(_tensor: Tensor, how: str) -> None:
    raise CaptureError(f"Tensor.{how}")


def _is_recording() -> bool:
    return not _off


def _is_host(tensor: Tensor, frame: Any) -> bool:
    """Whether a tensor is the host's, which nobody waits for: SGLang's name for it ends in _cpu where it is read."""
    values = frame.f_locals
    named = [name for name, value in values.items() if value is tensor]
    held = (getattr(value, "__dict__", {}) for value in values.values())
    named += [name for each in held for name, value in each.items() if value is tensor]
    return any(name.endswith("_cpu") for name in named)


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees each operation of torch."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: it would import torch's compiler, which takes two seconds."""
        return False


class _Recorder(DispatchMode):
    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tape = tape

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, kind = kwargs or {}, _kind_of(function)
        if kind.views:  # memory that is read as it is, and written by what follows
            return hand_on(function, *args, **kwargs)
        if kind.may_be_refused:
            _refuse(function, kind.name, args)
        writes = writes_to(function, args, kwargs)
        if writes:
            self._tape.keep(writes)
        result = hand_on(function, *args, **kwargs)
        reads: list[Tensor] = []
        frozen, named = _frozen(args, reads), _frozen(kwargs, reads)
        made, run = _to_make(function, frozen, named, reads, result)
        if not writes and not made:
            return result  # a view that its schema does not name
        if writes:
            run = functools.partial(_meet if function.namespace == _MEETS else hand_on, function, *frozen, **named)
        elif kind.name in _EMPTY:
            run = functools.partial(poison, made)
        self._tape.add(run, made, reads, writes)
        return result


class _Kind(NamedTuple):
    """What is known of an operation before it is called."""

    name: str
    views: bool  # all that it returns is memory of its arguments, which it leaves as it is
    may_be_refused: bool


@functools.cache
def _kind_of(function: Any) -> _Kind:
    schema, name = function._schema, function._schema.name.removeprefix("aten::")
    views = name in _VIEWS or all(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns)
    refused = not _REFUSED_TAGS.isdisjoint(function.tags) or name in _REFUSED
    return _Kind(name, views and not refused and len(schema.returns) > 0, refused)


def writes_to(function: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operation writes in place. A collective of torch's does not say which."""
    if function.namespace == _MEETS:
        return tensors((args, kwargs))
    written = _written_arguments(function)
    return tensors([args[n] if n < len(args) else kwargs.get(name) for n, name in written]) if written else []


@functools.cache
def _written_arguments(function: Any) -> tuple[tuple[int, str], ...]:
    schema = enumerate(function._schema.arguments)
    return tuple((n, one.name) for n, one in schema if one.alias_info is not None and one.alias_info.is_write)


def _meet(function: Any, *args: Any, **kwargs: Any) -> None:
    """Run a collective, and wait until it is over."""
    _, work = hand_on(function, *args, **kwargs)
    work.wait()


def _to_make(
    function: Any, args: Any, kwargs: Any, reads: Sequence[Tensor], result: Any
) -> tuple[tuple[Tensor, ...], Callable[[], None]]:
    """The tensors of a result whose memory is new, and what runs the function again and copies what it gives into them."""
    given = {tensor.untyped_storage().data_ptr() for tensor in reads}
    each = [one.detach() if one.untyped_storage().data_ptr() not in given else None for one in tensors(result)]
    return tuple(one for one in each if one is not None), functools.partial(_make, function, args, kwargs, each)


def _make(function: Any, args: Any, kwargs: Any, made: Sequence[Tensor | None]) -> None:
    result = hand_on(function, *args, **kwargs)
    for tensor, value in zip(made, tensors(result), strict=True):
        if tensor is not None:
            tensor.copy_(value)


def _refuse(function: Any, name: str, args: Any) -> None:
    """Raises CaptureError for what cudaStreamBeginCapture does not permit, or torch does by a copy to the host."""
    if name in _WAITING:
        raise CaptureError(name)
    if name in _INDEX:
        masked = any(isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8) for one in args[1])
        if masked and not (name != "index" and args[2].numel() == 1):  # a mask with one value is a masked_fill
            raise CaptureError(f"{name} with a boolean mask")
    elif not _REFUSED_TAGS.isdisjoint(function.tags):
        raise CaptureError(name, "the shape of its result is in the device's memory")
    if name == "repeat_interleave" and any(isinstance(one, Tensor) for one in args[1:]):
        raise CaptureError("repeat_interleave by a tensor")
    if name in _LIFTS and args[0].ndim:
        raise CaptureError("torch.tensor of Python numbers", "it copies from memory that is not pinned")
    if name in _RESHAPE_IN_PLACE:
        raise CaptureError(name, "a tape does not follow memory that a tensor exchanges")


def tensors(tree: Any) -> list[Tensor]:
    """All tensors of nested lists, tuples and dicts."""
    found: list[Tensor] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[Tensor]) -> None:
    if type(tree) in _LEAVES:
        return
    if isinstance(tree, Tensor):
        found.append(tree)
    elif isinstance(tree, _TREES):
        for part in tree.values() if isinstance(tree, dict) else tree:
            _collect(part, found)


def _frozen(tree: Any, found: list[Tensor]) -> Any:
    """The same memory in the same shapes, whatever becomes of the tensors. found: they are added to it."""

    def freeze(tensor: Tensor) -> Tensor:
        found.append(tensor.detach())
        return found[-1]

    return _map(freeze, tree)


def _map(change: Callable[[Tensor], Any], tree: Any) -> Any:
    """Lists, tuples and dicts with each tensor changed. torch's own takes five times as long."""
    if type(tree) in _LEAVES:
        return tree
    if isinstance(tree, Tensor):
        return change(tree)
    if not isinstance(tree, _TREES):
        return tree
    if isinstance(tree, dict):
        return {name: _map(change, part) for name, part in tree.items()}
    parts = [_map(change, part) for part in tree]
    return parts if isinstance(tree, list) else tuple(parts)


def _caller() -> tuple[str, int, str]:
    """The innermost frame that is neither torch's nor eagletwin's."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_BELOW):
        frame = frame.f_back
    return _NOWHERE if frame is None else (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def _raise_at(where: tuple[str, int, str], error: Exception) -> None:
    """Raise it again from a frame of the line of SGLang's that recorded the node, which is where it belongs."""
    file, line, name = where
    code = compile("\n" * (line - 1) + "raise error", file, "exec").replace(co_name=name)
    exec(code, {"error": error.with_traceback(None)})
