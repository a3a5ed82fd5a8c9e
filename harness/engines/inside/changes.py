"""Which changed statements ran: those of a source tree, and those of patches in memory (patches.py).

The modules of a tree that changed are compiled from their source as they are imported, with a call at each changed statement:
lines keep their numbers, and bytecode of an earlier state of the file is not read. The fast runtime compiles Triton kernels
with the same calls. Where another runtime runs a kernel, only a launch is seen: then the statements that stand under no
condition count as run, of a launched kernel and of all functions that it may call. zygote.py and worker.py install it before
the engine is imported.
"""

import ast
import contextlib
import cProfile
import gc
import inspect
import linecache
import sys
import textwrap
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from eagletwin.harness.core.differs import ChangedFunction, Differs, Point, Watch, with_executed
from eagletwin.harness.engines import triton_cpu
from eagletwin.harness.engines.changed_code import add_calls, changed_bodies
from eagletwin.harness.engines.protocol import CannotFollow

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


def install(plan: str = "") -> None:
    """Watch what the file `plan` names; "": nothing, as long as no edit is followed. Before the engine is imported."""
    sys.meta_path.insert(0, SourceFinder(lambda name: partial(_Loader, each) if (each := _places(name)) is not None else None))
    _read(plan)


def _read(plan: str) -> None:
    global _watch
    _watch = msgspec.json.decode(Path(plan).read_bytes(), type=Watch) if plan else None


def _places(module: str) -> tuple[ChangedFunction, ...] | None:
    """The changed functions of a module; None: it is as in the base."""
    return None if _watch is None else _watch.modules.get(module)


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


# An edit of a tree, in a fork of a process that has imported the tree as it was: `fuzz --watch` imports it once.
#
# What differs in bodies of functions needs no import. The module is compiled as an import would compile it, and the functions
# that there are take the new code, by whatever name they are known; their lines are then those of the file. An import decides
# the rest. So a fork refuses an edit of anything else, of a function that ran or whose code was read while the tree was
# imported, and of one that is no function any more: it has been compiled, or another one has its name.


@dataclass(slots=True)
class ImportedTree:
    """What an import leaves to its forks.

    ran, read  ids of code objects; files and ids of what `inspect` was asked for the source of
    functions  id of a code object -> the functions that have it
    answers    questions about the source that decided something, with their answers
    """

    watch: Watch | None = None
    executed: frozenset[str] = frozenset()
    ran: set[int] = field(default_factory=set)
    read: set[int | str] = field(default_factory=set)
    functions: dict[int, list[types.FunctionType]] = field(default_factory=dict)
    answers: list[tuple[Callable[[], object], object]] = field(default_factory=list)


_imported: ImportedTree | None = None


def decide(question: Callable[[], bool]) -> bool:
    """The answer to a question about the source of modules. A fork that follows an edit asks again, and needs the same."""
    read = set[int | str]() if _imported is None else {*_imported.read}
    answer = question()
    if _imported is not None:
        _imported.read = read
        _imported.answers.append((question, answer))
    return answer


@contextlib.contextmanager
def followed() -> Iterator[None]:
    """While the tree is imported whose edits forks of this process are to follow."""
    global _imported
    own_loader.made = {}
    _imported = found = ImportedTree()
    profile, find = cProfile.Profile(subcalls=False, builtins=False), inspect.findsource

    def find_and_note(asked: Any) -> Any:
        found.read.add(_asked_source(asked))
        return find(asked)

    inspect.findsource = find_and_note  # type: ignore[assignment]
    profile.enable()
    try:
        yield
    finally:
        installed: Any = sys.getprofile()
        if installed is not profile:  # something that was imported took its place: what ran is not known
            own_loader.made = None
        profile.disable()
        inspect.findsource = find
    found.ran = {id(entry.code) for entry in profile.getstats()}
    found.watch, found.executed = _watch, frozenset(executed)
    for one in gc.get_objects():
        if type(one) is types.FunctionType:
            found.functions.setdefault(id(one.__code__), []).append(one)


def _asked_source(asked: Any) -> int | str:
    """What `inspect` reads for it: the code of a function, or the file of a module or a class."""
    function = inspect.unwrap(asked) if inspect.isroutine(asked) else asked
    code = getattr(function, "__code__", getattr(function, "f_code", function))
    return id(code) if inspect.iscode(code) else str(inspect.getsourcefile(function))


def follow(package: str, called: str, root: str, plan: str = "") -> None:
    """Take over what was edited since the import, in a fork of its process. The arguments are those of an import. Raises
    CannotFollow; the process is then of no use."""
    before, made = _imported, own_loader.made
    if before is None or made is None:
        raise CannotFollow("this process has imported no tree that is edited")
    own_loader.made = None
    _read(plan)
    _confirm_what_is_absent()
    _confirm_what_ran(before)
    swaps = [swap for module, each in made.items() for swap in _swaps(before, module, each)]
    for function, code in swaps:
        function.__code__ = code
    linecache.clearcache()
    if any(question() != answer for question, answer in before.answers):
        raise CannotFollow("eagletwin would import it otherwise")
    own_loader.confirm(package, called, root)


def _confirm_what_is_absent() -> None:
    """What the import looked for in vain is still not there."""
    for name in {name for finder in sys.meta_path if isinstance(finder, SourceFinder) for name in finder.lost}:
        package = sys.modules.get(name.rpartition(".")[0])
        if package is not None and own_loader.source_of_module(name, getattr(package, "__path__", [])) is not None:
            raise CannotFollow(f"{name} is new")


def _confirm_what_ran(before: ImportedTree) -> None:
    """What the import ran of an earlier change is the same in this one, at the same lines."""
    for module, each in ({} if before.watch is None else before.watch.modules).items():
        for one in each:
            places = {text for _, text in (*one.calls, *one.goal_calls)}
            if not places.isdisjoint(before.executed) and one not in (_places(module) or ()):
                raise CannotFollow(f"{one.name} ran in the import")


def _swaps(
    before: ImportedTree, module: str, each: list[own_loader.Made]
) -> Iterator[tuple[types.FunctionType, types.CodeType]]:
    """The functions of a module that was loaded, and their new code; none if neither the file differs nor what is
    watched of it."""
    was, places = each[0], _places(module)
    try:
        source = Path(was.file).read_bytes()
        if source == was.source and places == (None if before.watch is None else before.watch.modules.get(module)):
            return
        bodies = changed_bodies(was.source, source)
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        raise CannotFollow(f"{module}: {error}") from error
    if bodies is None or len(each) > 1 or module not in sys.modules or was.file in before.read:
        raise CannotFollow(f"{module} differs in more than bodies of functions, or was read")
    loader = own_loader.Loader(module, was.file) if places is None else _Loader(places, module, was.file)
    sys.modules[module].__dict__[CALL] = executed.add
    for name, old, new in _pairs(was.code, loader.get_code(module), bodies):
        functions = before.functions.get(id(old), [])
        if name in bodies and (not functions or {id(old)} & (before.ran | before.read)):
            raise CannotFollow(f"{module}.{name} ran in the import, or is no function any more")
        if functions and (old.co_freevars, old.co_flags) != (new.co_freevars, new.co_flags):
            raise CannotFollow(f"{module}.{name} is another kind of function")
        yield from ((function, new) for function in functions)


def _pairs(
    old: types.CodeType, new: types.CodeType, bodies: Collection[str], within: str = ""
) -> Iterator[tuple[str, types.CodeType, types.CodeType]]:
    """The code objects in two of a module, side by side and with their names, down to the functions whose bodies differ."""
    before, now = ([one for one in code.co_consts if inspect.iscode(one)] for code in (old, new))
    if [one.co_name for one in before] != [one.co_name for one in now]:
        raise CannotFollow(f"{old.co_name} holds other functions")
    for one, other in zip(before, now, strict=True):
        name = within + one.co_name
        yield name, one, other
        if name not in bodies:
            yield from _pairs(
                one, other, bodies, f"{name}." if not one.co_flags & inspect.CO_OPTIMIZED else f"{name}.<locals>."
            )
