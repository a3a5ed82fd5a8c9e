"""Modules that are loaded by a loader of ours: found as Python finds them, their bytecode kept by content."""

import _imp
import ast
import contextlib
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import marshal
import sys
import types
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from eagletwin.harness.core.files import cache_folder

# Modules that are loaded from their source by a loader of ours: found as Python finds them, and only their loader differs.

LoaderOf = Callable[[str, str], importlib.machinery.SourceFileLoader]


class SourceFinder(importlib.abc.MetaPathFinder):
    """Finds the modules for which `choose` has a loader, by their name; the loader is made of the module's name and its file. A
    module that has no source file is left to Python."""

    def __init__(self, choose: Callable[[str], LoaderOf | None]) -> None:
        self._choose = choose

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,  # noqa: ARG002  the import system's signature
    ) -> importlib.machinery.ModuleSpec | None:
        loader = self._choose(fullname)
        if loader is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.origin is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            return None
        spec.loader = loader(fullname, spec.origin)
        return spec


# SGLang's bytecode, kept by the content of its source. Called by zygote.py, worker.py and the kernel tier before SGLang is
# imported, where it is not the installed one.
#
# Python keeps bytecode by the place of the source, and trusts it by the source's time and size. Two versions of a tree can
# share all of these (a copy that keeps times, an edit of one digit), and the name of the tree goes by content: the old code
# would run under the new name. Here the name of the file is a digest of the source. So a module is compiled once, in whatever
# tree or release it lies: a tree seen for the first time starts as soon as one that was seen before.


def install() -> None:
    """Before SGLang is imported, and before what replaces loaders of single modules, which goes first."""
    sys.meta_path.insert(0, SourceFinder(lambda name: Loader if name.partition(".")[0] == "sglang" else None))


class Loader(importlib.machinery.SourceFileLoader):
    """Loads a module from bytecode that was made of this very source, or from the source."""

    def get_code(self, fullname: str) -> types.CodeType:
        file = self.get_filename(fullname)
        source = self.get_data(file)
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
        tree = ast.parse(self.get_data(file), file)
        self.add_notes(tree)
        code: types.CodeType = compile(tree, file, "exec", dont_inherit=True)
        return code

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__[self.called] = self.ran
        super().exec_module(module)


def note(body: list[ast.stmt], what: str | int, *, documented: bool = False) -> None:
    """Have the statements of a body begin with a call that says `what`, behind a docstring."""
    call = ast.Call(ast.Name(_NOTE, ast.Load()), [ast.Constant(what)], [])
    at = body[documented] if len(body) > documented else body[0]
    said = ast.copy_location(ast.Expr(call), at)
    body.insert(int(documented), ast.fix_missing_locations(said))
