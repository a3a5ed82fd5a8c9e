"""What transformers finds out anew each time it is imported, and the same each time, remembered on disk.

It reads the metadata of every installed package, and the source of each of its models, twice, for the names in them. Both are
remembered for as long as the folders that they were read from are as they were.
"""

import contextlib
import hashlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import marshal
import os
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eagletwin.harness.paths import cache_folder

_MODULE = "transformers.utils.import_utils"


def install(shims: list[str]) -> None:
    """Before transformers is imported."""
    sys.meta_path.insert(0, _Finder())
    shims.append(f"{_MODULE}: the names in its models, and who installed which package, are remembered from start to start")


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,  # noqa: ARG002  the import system's signature
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path) if fullname == _MODULE else None
        if spec is None or spec.origin is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            return None
        spec.loader = _Loader(fullname, spec.origin)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: types.ModuleType) -> None:
        """Run the module, which asks for all installed packages, and replace its function that looks for names."""
        read, find = importlib.metadata.packages_distributions, "define_import_structure"
        importlib.metadata.packages_distributions = lambda: _remembered("packages", sys.path, read)
        try:
            super().exec_module(module)
        finally:
            importlib.metadata.packages_distributions = read
        if hasattr(module, find):
            look = getattr(module, find)

            def found(module_path: Any, prefix: str | None = None) -> Any:
                place = Path(module_path)
                folder = place if place.is_dir() else place.parent
                inside = (entry.path for entry in os.scandir(folder) if entry.is_dir())
                return _remembered(f"{module_path} {prefix}", [str(folder), *inside], lambda: look(module_path, prefix))

            setattr(module, find, found)


def _remembered(name: str, folders: Sequence[str], work_out: Callable[[], Any]) -> Any:
    """What work_out() returned when these folders were as they are now: plain dicts, sets and strings."""
    key = repr((name, sys.version, [(folder, _changed(folder)) for folder in sorted(folders)])).encode()
    file = cache_folder("imports") / hashlib.sha256(key).hexdigest()
    with contextlib.suppress(OSError, EOFError, ValueError, TypeError):
        return marshal.loads(file.read_bytes())
    found = work_out()
    with contextlib.suppress(OSError, ValueError):  # a start without it is slower, and nothing else
        scratch = file.with_name(f".{file.name}.{os.getpid()}")
        scratch.write_bytes(marshal.dumps(found))
        scratch.replace(file)
    return found


def _changed(folder: str) -> int:
    """When an entry was last added to a folder or taken away; 0 where there is none."""
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return 0
