"""Stand-ins for modules that only a GPU needs, or that only cost time here: they import, and nothing in them can be called.

Attribute access, subclassing and annotations work, because SGLang does all three while it is imported. A call raises
StubCalled with the dotted name and the caller: a stub that returned silently would hide a kernel that never ran. Every
trace lists them.
"""

import importlib.abc
import importlib.machinery
import re
import sys
import types
from collections.abc import Sequence
from typing import Any

# Packages of a GPU installation, stubbed whether they are there or not.
GPU = ("sgl_kernel", "torchaudio", "torchcodec", "torchvision")
# Modules that SGLang imports and a case never calls: what stands in front of the scheduler, what loads other models, and what
# compiles or shards them. Each is stubbed where it exists, so that what is absent stays absent.
IDLE = (
    "IPython",
    "aiohttp",
    "compressed_tensors",
    "fastapi",
    "gguf",
    "sglang.srt.entrypoints.openai.protocol",
    "sglang.srt.entrypoints.v1_loads",  # it calls fastapi while it is imported
    "sglang.srt.layers.model_parallel",
    "transformers.conversion_mapping",
    "transformers.generation.continuous_batching",
    "transformers.generation.utils",
    "transformers.masking_utils",
    "transformers.modeling_utils",
    "uvicorn",
)

# The same of transformers' own models: a release imports those of the families that it loads, for parts of them. auto's are
# registries, which are written to.
_MODELS = re.compile(r"transformers\.models\.(?!auto\.)\w+\.modeling_\w+")

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


class StubModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        stub = _make(f"{self.__name__}.{name}")
        setattr(self, name, stub)
        return stub


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a stub for each module of these full names, for a model of transformers, and for whatever is asked for below them.

    idle: where it is empty, nothing is stubbed that would only cost time."""

    def __init__(self, gpu: tuple[str, ...] = GPU, idle: tuple[str, ...] = IDLE) -> None:
        self._gpu, self._idle = frozenset(gpu), frozenset(idle)

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,  # noqa: ARG002  the import system's signature
    ) -> importlib.machinery.ModuleSpec | None:
        parent = sys.modules.get(fullname.rpartition(".")[0])
        exists = importlib.machinery.PathFinder.find_spec
        idle = self._idle and (fullname in self._idle or _MODELS.fullmatch(fullname))
        if fullname in self._gpu or isinstance(parent, StubModule) or (idle and exists(fullname, path)):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StubModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


_stubbed: list[str] = []


def install(gpu: tuple[str, ...] = GPU, idle: tuple[str, ...] = IDLE) -> None:
    """Put the stubs first in line, so that an installed GPU package is not half-used on a CPU.

    gpu: packages to be stubbed whether they are there or not; idle: where they exist."""
    _stubbed[:] = dict.fromkeys((*gpu, *idle, *(("transformers.models.*.modeling_*",) if idle else ())))
    sys.meta_path.insert(0, StubFinder(gpu, idle))


def come_first() -> None:
    """Before whatever looks for modules of SGLang, which some of the stubs are."""
    sys.meta_path.sort(key=lambda finder: not isinstance(finder, StubFinder))


def declared() -> tuple[str, ...]:
    """A line each for those who read what was changed. The imported ones would not do: a process that is forked from one that
    has served other families has imported more, and two traces of one case would differ."""
    return tuple(f"{name}: a stub, which raises when it is called" for name in _stubbed)
