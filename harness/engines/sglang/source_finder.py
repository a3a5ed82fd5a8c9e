"""Modules that are loaded from their source by a loader of ours: found as Python finds them, and only their loader differs."""

import importlib.abc
import importlib.machinery
import types
from collections.abc import Callable, Mapping, Sequence


class SourceFinder(importlib.abc.MetaPathFinder):
    """Finds these modules, each with the loader that is made of its name and its file. A module that has no source file is left
    to Python."""

    def __init__(self, loaders: Mapping[str, Callable[[str, str], importlib.machinery.SourceFileLoader]]) -> None:
        self._loaders = loaders

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,  # noqa: ARG002  the import system's signature
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._loaders:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.origin is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            return None
        spec.loader = self._loaders[fullname](fullname, spec.origin)
        return spec
