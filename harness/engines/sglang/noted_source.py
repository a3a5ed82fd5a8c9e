"""Modules that say which of their parts ran: compiled from their source with calls added, lines keep their numbers."""

import ast
import importlib.machinery
import types
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

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
