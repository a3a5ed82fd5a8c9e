"""How this process imports an engine: modules by a loader of ours, which blocks of them run, and which release or tree it is.

Modules are found as Python finds them, and their bytecode is kept by content.
"""

import _imp
import ast
import contextlib
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import marshal
import os
import sys
import types
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from eagletwin.harness.core.files import cache_folder
from eagletwin.harness.engines.blocks import FOLDER, OF, SPECULATIVE, blocks_of

# Modules that are loaded from their source by a loader of ours: found as Python finds them, and only their loader differs.

LoaderOf = Callable[[str, str], importlib.machinery.SourceFileLoader]


class SourceFinder(importlib.abc.MetaPathFinder):
    """Finds the modules for which `choose` has a loader, by their name; the loader is made of the module's name and its file. A
    module that has no source file is left to Python."""

    def __init__(self, choose: Callable[[str], LoaderOf | None]) -> None:
        self._choose = choose
        self.lost: set[str] = set()  # modules that were looked for, and that have no source file

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,  # noqa: ARG002  the import system's signature
    ) -> importlib.machinery.ModuleSpec | None:
        loader = self._choose(fullname)
        if loader is None:
            return None
        spec = source_of_module(fullname, path)
        if spec is None:
            self.lost.add(fullname)
            return None
        spec.loader = loader(fullname, str(spec.origin))
        return spec


def source_of_module(name: str, path: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
    """As Python finds it; None: it has no source file, or is not there."""
    spec = importlib.machinery.PathFinder.find_spec(name, path)
    sourced = spec is not None and spec.origin is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader)
    return spec if sourced else None


# The engine's bytecode, kept by the content of its source. Called before it is imported, where it is not the installed one.
#
# Python keeps bytecode by the place of the source, and trusts it by the source's time and size. Two versions of a tree can
# share all of these (a copy that keeps times, an edit of one digit), and the name of the tree goes by content: the old code
# would run under the new name. Here the name of the file is a digest of the source. So a module is compiled once, in whatever
# tree or release it lies: a tree seen for the first time starts as soon as one that was seen before.


def install(package: str) -> None:
    """Before the engine is imported, and before what replaces loaders of single modules, which goes first."""
    sys.meta_path.insert(0, SourceFinder(lambda name: Loader if name.partition(".")[0] == package else None))


class Loader(importlib.machinery.SourceFileLoader):
    """Loads a module from bytecode that was made of this very source, or from the source."""

    def get_code(self, fullname: str) -> types.CodeType:
        file = self.get_filename(fullname)
        source = self.get_data(file)
        return _kept_code(fullname, file, source, self._code(file, source))

    def _code(self, file: str, source: bytes) -> types.CodeType:
        digest = hashlib.sha256(importlib.util.MAGIC_NUMBER + source).hexdigest()
        cached = str(cache_folder("bytecode") / "by-content" / digest)
        code: types.CodeType
        with contextlib.suppress(OSError, EOFError, ValueError, TypeError):  # absent or damaged
            code = marshal.loads(self.get_data(cached))
            # it may have been compiled where the same source lay before; typeshed does not know what importlib calls for that
            _imp._fix_co_filename(code, file)  # type: ignore[attr-defined]
            return code
        code = self.source_to_code(source, file)
        self.set_data(cached, marshal.dumps(code))
        return code


# What modules were made of, in a process whose forks follow edits of them (changes.py).


@dataclass(frozen=True, slots=True)
class Made:
    """A module as it was loaded."""

    file: str
    source: bytes
    code: types.CodeType


made: dict[str, list[Made]] | None = None  # None: it is not kept


def _kept_code(module: str, file: str, source: bytes, code: types.CodeType) -> types.CodeType:
    if made is not None:
        made.setdefault(module, []).append(Made(file, source, code))
    return code


# Imports that are made once, before processes are forked that would each make them.


def import_early(names: Iterable[str], shims: list[str]) -> None:
    """Import these modules. One that is not there, or needs one that is not, is for the process to report that needs it.

    Any other failure is listed among the shims: a second import of what was imported by half may not raise."""
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        except Exception as error:
            failed = f"{name}: failed when it was imported before the fork: {type(error).__name__}: {error}"
            if failed not in shims:
                shims.append(failed)


# Modules that say which of their parts ran: compiled from their source with calls added, lines keep their numbers.

_NOTE = "_eagletwin_ran"  # what the added calls call


class NotedSource(importlib.machinery.SourceFileLoader):
    """Loads a module whose source `add_notes` has added calls to: of the global `called`, which is `ran`."""

    called = _NOTE
    ran: Callable[[Any], None]

    @abstractmethod
    def add_notes(self, tree: ast.Module) -> None:
        """Add `note`s to the tree."""

    def get_code(self, fullname: str) -> types.CodeType:
        """Code of the source as it is, never bytecode: that goes by time and size, and has no notes."""
        file = self.get_filename(fullname)
        source = self.get_data(file)
        tree = ast.parse(source, file)
        self.add_notes(tree)
        return _kept_code(fullname, file, source, compile(tree, file, "exec", dont_inherit=True))

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__[self.called] = self.ran
        super().exec_module(module)


def note(body: list[ast.stmt], what: str | int, *, documented: bool = False) -> None:
    """Have the statements of a body begin with a call that says `what`, behind a docstring."""
    call = ast.Call(ast.Name(_NOTE, ast.Load()), [ast.Constant(what)], [])
    at = body[documented] if len(body) > documented else body[0]
    said = ast.copy_location(ast.Expr(call), at)
    body.insert(int(documented), ast.fix_missing_locations(said))


# Which blocks of the engine's speculative code run, in every process of a run (`gpu run --blocks` and `mutants` of tests/lab).
#
# The modules are compiled from their source with a note at the start of each block, and so are functions that a patch edits.
# Triton kernels have none.
#
# Called before the engine is imported, and by runner.py when a case is done.

_ran: dict[str, set[int]] = {}  # file -> first lines of blocks that ran, here or before the fork
_before: dict[str, set[int]] = {}  # the same of those that ran before the capture of a graph that goes on


def note_blocks() -> None:
    """Note what runs from now on, if a folder is named. Before the engine is imported."""
    if os.environ.get(FOLDER):
        sys.meta_path.insert(0, SourceFinder(_loader_of))


def forget_blocks() -> None:
    """A case begins: where each is told apart, forget what ran so far."""
    if OF in os.environ:
        for lines in _ran.values():
            lines.clear()


def begin_capture() -> None:
    """A CUDA graph's capture begins: what runs until its end counts where the graph is replayed."""
    for file, lines in _ran.items():
        _before[file] = set(lines)
        lines.clear()


def end_capture() -> dict[str, frozenset[int]]:
    """What ran in the capture."""
    held = {file: frozenset(lines) for file, lines in _ran.items() if lines}
    for file, lines in _before.items():
        _ran[file] |= lines
    return held


def replay_blocks(held: Mapping[str, Iterable[int]]) -> None:
    """A graph is replayed whose capture ran these."""
    for file, lines in held.items():
        _ran[file].update(lines)


def write_blocks(device: str) -> None:
    """What ran so far in this process, into a file of its own."""
    folder = os.environ.get(FOLDER)
    if folder:
        ran = {file: sorted(lines) for file, lines in _ran.items()}
        Path(folder, f"{device}-{os.getpid()}.json").write_bytes(msgspec.json.encode(ran))


class _Loader(NotedSource):
    def __init__(self, name: str, path: str) -> None:
        super().__init__(name, path)
        self.ran = _ran.setdefault(path, set()).add

    def add_notes(self, tree: ast.Module) -> None:
        for block, body, documented in list(blocks_of(tree)):
            note(body, block.line, documented=documented)


def blocks_of_edit(definition: ast.FunctionDef, function: Any) -> list[tuple[list[ast.stmt], int, bool]]:
    """The bodies of an edited function that are blocks of its file, too: their first lines there, and whether a docstring comes
    first. Empty if nothing is noted of its module."""
    if _NOTE not in function.__globals__:
        return []
    inside, own = function.__qualname__, dict[tuple[str, str], list[int]]()
    for block, _, _ in blocks_of(ast.parse(Path(function.__globals__["__file__"]).read_text(encoding="utf-8"))):
        if f"{block.function}.".startswith(f"{inside}."):
            own.setdefault((block.function.removeprefix(inside), block.branch), []).append(block.line)
    found = []
    for block, body, documented in blocks_of(ast.Module([definition], [])):
        lines = own.get((block.function.removeprefix(definition.name), block.branch))
        if lines:
            found.append((body, lines.pop(0), documented))
    return found


def _loader_of(module: str) -> LoaderOf | None:
    noted = os.environ.get(OF, SPECULATIVE).split(",")
    return _Loader if any(module == name or module.startswith(f"{name}.") for name in noted) else None


# Which release or tree this process has imported, and what traces call it.
#
# The package's own __version__ is the installed one's, whatever was imported, where a source tree has no metadata of its own.

_versions: dict[str, str] = {}


def folder_of(package: str) -> Path:
    """Where a package lies that was imported, or can be."""
    return Path(importlib.import_module(package).__path__[0])


def confirm(package: str, named: str, root: str) -> None:
    """Take over the version that the caller names; raise ImportError if what was imported lies elsewhere than below `root`."""
    where = folder_of(package)
    if not where.samefile(Path(root) / package):
        raise ImportError(f"asked for the {package} in {root}, and Python imported the one in {where.parent}")
    _versions[package] = named


def confirm_installed(package: str) -> None:
    """Raise ImportError if Python imports another one than the installed one: traces would call it by that one's version."""
    where = folder_of(package)
    try:
        installed = Path(str(importlib.metadata.distribution(package).locate_file(package)))
    except importlib.metadata.PackageNotFoundError:
        return
    if installed.is_dir() and not where.samefile(installed):  # an editable installation has no such folder
        raise ImportError(
            f"Python imports the {package} in {where.parent}, and the installed one is in {installed.parent}: take the other "
            f"off PYTHONPATH, or name it, --{package} {where.parent}"
        )


def version(package: str) -> str:
    """The release, or the commit of a source tree."""
    return _versions.get(package) or str(importlib.import_module(package).__version__)
