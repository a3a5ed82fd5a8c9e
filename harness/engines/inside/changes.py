"""Which changed statements ran: those of a source tree, and those of patches in memory (patches.py).

The modules of a tree that changed are compiled from their source as they are imported, with a call at each changed statement:
lines keep their numbers, and bytecode of an earlier state of the file is not read. The fast runtime compiles Triton kernels
with the same calls. Where another runtime runs a kernel, only a launch is seen: then the statements that stand under no
condition count as run, of a launched kernel and of all functions that it may call. zygote.py and worker.py install it before
the engine is imported.
"""

import ast
import inspect
import sys
import textwrap
import types
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from eagletwin.harness.core.differs import ChangedFunction, Differs, Point, Watch, with_executed
from eagletwin.harness.engines import triton_cpu
from eagletwin.harness.engines.changed_code import add_calls

from . import own_loader
from .blame import hand_on
from .own_loader import NotedSource, SourceFinder

# A CUDA graph is captured once for each batch size, and no Python runs in a replay. The statements that ran in its capture
# count where it is replayed.

executed: set[str] = set()  # places of changed statements that ran, here or before the fork
captured: set[str] = set()  # those of them that ran in the capture of any graph

CALL = "_eagletwin_executed"  # the global by which changed code notes that it runs


def watch_graphs(graphs: Any) -> None:
    """Note which statements each graph of this class (torch.cuda.CUDAGraph) holds, and count them where it is replayed. Called
    before any is captured."""
    begin, end, replay = graphs.capture_begin, graphs.capture_end, graphs.replay
    before: set[str] = set()

    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        hand_on(begin, self, *args, **kwargs)
        before.update(executed)
        executed.clear()
        own_loader.begin_capture()

    def capture_end(self: Any) -> None:
        self.eagletwin_executed, self.eagletwin_blocks = frozenset(executed), own_loader.end_capture()
        captured.update(executed)
        executed.update(before)
        before.clear()
        hand_on(end, self)

    def noted_replay(self: Any) -> None:
        executed.update(self.eagletwin_executed)
        own_loader.replay_blocks(self.eagletwin_blocks)
        hand_on(replay, self)

    graphs.capture_begin, graphs.capture_end, graphs.replay = capture_begin, capture_end, noted_replay


_watch: Watch | None = None
_launches_deep: bool | None = None  # whether launches are watched, and if so, whether for all that a kernel names


def install(plan: str) -> None:
    """Watch what the file `plan` names. Before the engine is imported."""
    global _watch
    _watch = msgspec.json.decode(Path(plan).read_bytes(), type=Watch)
    sys.meta_path.insert(0, SourceFinder({name: partial(_Loader, places) for name, places in _watch.modules.items()}.get))


def watch_kernels() -> None:
    """Note what changed kernels run in the fast runtime. Before it compiles any."""
    for name, each in _kernels().items():
        triton_cpu.watch(name, partial(add_calls, points=_calls(each), name=CALL), CALL, executed.add)


def watch_launches(*, fast: bool) -> None:
    """Note launches of changed kernels. Before a scheduler is built. fast: the fast runtime runs them."""
    global _launches_deep
    if not _kernels():
        return
    if _launches_deep is None:
        _watch_launches()
    _launches_deep = not fast


def differs() -> Differs | UnsetType:
    """What to say in a trace: nothing of an engine that was not changed."""
    if _watch is None:
        return UNSET
    found = with_executed(_watch.differs, executed)
    return replace(found, imported=tuple(name for name in found.modules if name in sys.modules))


def calls_in(file: str, first: int, last: int) -> list[tuple[Point, str]]:
    """The changed statements between two lines of a file: of a function that a patch edits as well."""
    watched = _watch.modules if _watch is not None else {}
    inside = [place for each in watched.values() for place in each if first <= place.line <= last]
    return [call for place in inside for call in place.calls if file.endswith(call[1].partition(":")[0])]


def _kernels() -> dict[str, list[ChangedFunction]]:
    places = () if _watch is None else (place for each in _watch.modules.values() for place in each)
    found: dict[str, list[ChangedFunction]] = {}
    for place in places:
        if place.kernel:
            found.setdefault(place.name, []).append(place)
    return found


def _calls(each: Sequence[ChangedFunction]) -> list[tuple[Point, str]]:
    return [call for place in each for call in place.calls]


class _Loader(NotedSource):
    called, ran = CALL, staticmethod(executed.add)

    def __init__(self, places: tuple[ChangedFunction, ...], name: str, path: str) -> None:
        super().__init__(name, path)
        self._places = [place for place in places if not place.kernel]

    def add_notes(self, tree: ast.Module) -> None:
        add_calls(tree, [*_calls(self._places), *(call for place in self._places for call in place.goal_calls)], CALL)


def _watch_launches() -> None:
    """Every launch goes through here from now on."""
    from triton.runtime.jit import KernelInterface

    taken: Any = KernelInterface.__getitem__
    watched = _kernels()
    named: dict[Any, frozenset[str]] = {}  # kernel -> the places of it, and of all that it names, that each launch runs

    def launch(self: Any, grid: Any) -> Any:
        run = taken(self, grid)
        function = _function(self)
        if not _launches_deep:
            return run  # the fast runtime notes each statement
        if function not in named:
            named[function] = frozenset(
                place
                for name, one in _collect_callees(function, {}).items()
                if name in watched
                for place in _always(one, watched[name])
            )
        found = named[function]
        if not found:
            return run

        def launch_and_note(*args: Any, **kwargs: Any) -> Any:
            executed.update(found)
            return hand_on(run, *args, **kwargs)

        return launch_and_note

    KernelInterface.__getitem__ = launch


def _function(kernel: Any) -> Any:
    """The Python function of a kernel, under what wraps it."""
    while not isinstance(kernel, types.FunctionType) and hasattr(kernel, "fn"):
        kernel = kernel.fn
    return kernel


def _collect_callees(function: Any, found: dict[str, Any]) -> dict[str, Any]:
    """A kernel and all that it may call, by name: functions that its code names, and theirs."""
    found[triton_cpu.dotted_name(function)] = function
    for name in getattr(getattr(function, "__code__", None), "co_names", ()):
        other = _function(function.__globals__.get(name))
        if isinstance(other, types.FunctionType) and triton_cpu.dotted_name(other) not in found:
            _collect_callees(other, found)
    return found


def _always(function: Any, each: Sequence[ChangedFunction]) -> list[str]:
    """The places of a kernel that every launch runs: those that stand in its own block."""
    first = function.__code__.co_firstlineno
    tree = ast.parse("\n" * (first - 1) + textwrap.dedent(inspect.getsource(function)))
    own = {statement.lineno for one in tree.body for statement in (one, *getattr(one, "body", ()))}
    return [place for point, place in _calls(each) if point.line in own and point.where in ("before", "after", "entry")]
