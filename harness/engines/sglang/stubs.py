"""Stand-ins for packages that only a GPU needs: they import, and nothing in them can be called.

Attribute access, subclassing and annotations work, because SGLang does all three while it is imported. A call raises
StubCalled with the dotted name and the caller: a stub that returned silently would hide a kernel that never ran.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

STUBBED = ("sgl_kernel", "torchaudio", "torchcodec", "torchvision")

called: list[str] = []  # every stub that was called, also where SGLang swallowed the exception


class StubCalled(NotImplementedError):
    """A function of a stubbed package was called and has no implementation here."""


class _StubType(type):
    """Class of stub classes: any attribute is a stub, any call raises."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        stub = _make(f"{cls.__qualname__}.{name}")
        setattr(cls, name, stub)
        return stub

    def __call__(cls, *args: object, **kwargs: object) -> Any:
        if "_eagletwin_stub" in cls.__dict__:
            frame = sys._getframe(1)
            called.append(cls.__qualname__)
            raise StubCalled(
                f"{cls.__qualname__} was called at {frame.f_code.co_filename}:{frame.f_lineno}, and this CPU engine has no "
                "implementation of it"
            )
        return super().__call__(*args, **kwargs)  # a real class that inherits from a stub

    def __or__(cls, other: object) -> Any:
        return object

    __ror__ = __or__


def _make(name: str) -> _StubType:
    return _StubType(name, (), {"_eagletwin_stub": True, "__qualname__": name, "__module__": name.rpartition(".")[0]})


class _StubModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        stub = _make(f"{self.__name__}.{name}")
        setattr(self, name, stub)
        return stub


class _StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002  the import system's signature
        target: types.ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in STUBBED:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install() -> None:
    """Put the stubs first in line, so that an installed GPU package is not half-used on a CPU."""
    sys.meta_path.insert(0, _StubFinder())
