"""Modules that are loaded from their source by a loader of ours: found as Python finds them, and only their loader differs."""

import importlib.abc
import importlib.machinery
import types
from collections.abc import Callable, Sequence

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
