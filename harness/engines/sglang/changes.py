"""Which functions that a source tree changed are called. Called by zygote.py and worker.py before SGLang is imported.

The modules that changed are compiled from their source as they are imported, with a first statement in each changed function
that notes the call: lines keep their numbers, and bytecode of an earlier state of the file is not read. A Triton kernel is
compiled from its source by others: it is noted when it is launched, and a function that kernels call when the fast runtime
calls it, or, where it is not the fast runtime that runs the kernel, when a kernel that names it is launched.
"""

import ast
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from eagletwin.harness.core.differs import ChangedFunction, Differs, Watch
from eagletwin.harness.engines import triton_cpu

from . import patches
from .blame import hand_on
from .noted_source import NotedSource, note
from .source_finder import SourceFinder

ran: set[str] = set()  # changed functions that were called, here or before the fork

_watch: Watch | None = None
_launches_deep: bool | None = None  # whether launches are watched, and if so, whether for all that a kernel names


def install(plan: str) -> None:
    """Watch what the file `plan` names. Before SGLang is imported."""
    global _watch
    _watch = msgspec.json.decode(Path(plan).read_bytes(), type=Watch)
    sys.meta_path.insert(0, SourceFinder({name: partial(_Loader, places) for name, places in _watch.modules.items()}.get))


def watch_kernels() -> None:
    """Note calls of changed kernels in the fast runtime. Before it compiles any."""
    if _kernels():
        triton_cpu.watch(_kernels(), ran.add)


def watch_launches(*, fast: bool) -> None:
    """Note launches of changed kernels. Before a scheduler is built. fast: the fast runtime runs them."""
    global _launches_deep
    if not _kernels():
        return
    if _launches_deep is None:
        _watch_launches()
    _launches_deep = not fast


def differs() -> Differs | UnsetType:
    """What to say in a trace: nothing of an SGLang that was not changed."""
    if _watch is None:
        return UNSET
    found = _watch.differs
    called = ran | patches.ran  # a patch of a changed function takes the place of its code
    return replace(
        found,
        ran=tuple(name for name in found.functions if name in called),
        imported=tuple(name for name in found.modules if name in sys.modules),
    )


def _kernels() -> frozenset[str]:
    places = () if _watch is None else (place for each in _watch.modules.values() for place in each)
    return frozenset(place.name for place in places if place.kernel)


class _Loader(NotedSource):
    ran = staticmethod(ran.add)

    def __init__(self, places: tuple[ChangedFunction, ...], name: str, path: str) -> None:
        super().__init__(name, path)
        self._names = {place.line: place.name for place in places if not place.kernel}

    def add_notes(self, tree: ast.Module) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.lineno in self._names:
                note(node.body, self._names[node.lineno], documented=ast.get_docstring(node, clean=False) is not None)


def _watch_launches() -> None:
    """Every launch goes through here from now on."""
    from triton.runtime.jit import KernelInterface

    taken: Any = KernelInterface.__getitem__
    watched = _kernels()
    named: dict[Any, frozenset[str]] = {}  # kernel -> the watched ones that it names, itself included

    def launch(self: Any, grid: Any) -> Any:
        run = taken(self, grid)
        function = _function(self)
        if _launches_deep and function not in named:
            named[function] = frozenset(_named(function, set())) & watched
        found = named[function] if _launches_deep else watched & {triton_cpu.dotted(function)}
        if not found:
            return run

        def noted(*args: Any, **kwargs: Any) -> Any:
            ran.update(found)
            return hand_on(run, *args, **kwargs)

        return noted

    KernelInterface.__getitem__ = launch


def _function(kernel: Any) -> Any:
    """The Python function of a kernel, under what wraps it."""
    while not isinstance(kernel, types.FunctionType) and hasattr(kernel, "fn"):
        kernel = kernel.fn
    return kernel


def _named(function: Any, seen: set[Any]) -> set[str]:
    """The names of a kernel and of all that it may call: functions that its code names, and theirs."""
    seen.add(function)
    names = {triton_cpu.dotted(function)}
    for name in getattr(getattr(function, "__code__", None), "co_names", ()):
        other = _function(function.__globals__.get(name))
        if isinstance(other, types.FunctionType) and other not in seen:
            names |= _named(other, seen)
    return names
