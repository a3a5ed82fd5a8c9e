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

import torch

from eagletwin.harness.engines.inside.blame import theirs

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


theirs.append(StubCalled)


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


def describe_stubs() -> tuple[str, ...]:
    """A line each for those who read what was changed. The imported ones would not do: a process that is forked from one that
    has served other families has imported more, and two traces of one case would differ."""
    return tuple(f"{name}: a stub, which raises when it is called" for name in _stubbed)


# What SGLang's model classes take of transformers' PreTrainedModel, where that is stubbed: a module with a configuration.
#
# The real one costs 3 s of imports in each process, most of them of torch's compiler, and makes and saves models that
# transformers loads. SGLang loads its own, and calls none of that: Gemma-4's classes inherit from it, keep their configuration
# in it, and ask it to fill in weights that SGLang fills in afterwards.

_MODULE, _CLASS = "transformers.modeling_utils", "PreTrainedModel"
PRETRAINED_SHIM = f"{_MODULE}.{_CLASS}: a torch module with a configuration, for SGLang's classes that inherit from it"


class KeptConfiguration(torch.nn.Module):
    """Stands for PreTrainedModel."""

    def __init__(self, config: Any, *_: Any, **__: Any) -> None:
        super().__init__()
        self.config = config

    def post_init(self) -> None:
        """transformers would fill in weights that no checkpoint has; SGLang's loader does it."""


def stand_in_for_pretrained() -> None:
    """For classes that are imported from now on. Where transformers' own is not stubbed it stays."""
    import transformers

    __import__(_MODULE)
    found = sys.modules[_MODULE]
    if isinstance(found, StubModule):
        setattr(found, _CLASS, KeptConfiguration)
        setattr(transformers, _CLASS, KeptConfiguration)


def lacks_pretrained(found: Any) -> bool:
    """Whether this is a class that inherits from the stub: its module was imported before `stand_in`."""
    bases = found.__mro__[1:] if isinstance(found, type) else ()
    return any((base.__module__, base.__qualname__.rpartition(".")[2]) == (_MODULE, _CLASS) for base in bases)


# A tokenizer without text, for requests with min_new_tokens: SGLang asks it which tokens end a request, beside those that the
# model's configuration and the request name, and with which token the first turn of a session begins. It names none, and a case
# has no text that could stop one.


class Ends:
    """What SGLang reads of a tokenizer there."""

    bos_token_id: int | None = None
    eos_token_id: int | None = None
    additional_stop_token_ids: frozenset[int] | None = None

    def encode(self, text: str, **_options: object) -> list[int]:
        raise NotImplementedError(f"a case has tokens alone, and SGLang wants those of the text {text!r}")

    def decode(self, tokens: list[int], **_options: object) -> str:
        raise NotImplementedError(f"a case has tokens alone, and SGLang wants the text of {tokens}")


# SGLang 0.5.10 to 0.5.21 registers image processors while it is imported; a transformers without torchvision refuses.
#
# Seen on the transformers that these releases pin, 5.3.0 to 5.12.1. No case has an image: what is registered is never looked
# up.

_NAME = "AutoImageProcessor"


def let_image_processors_register(shims: list[str]) -> None:
    """Let registrations through where transformers offers only a placeholder that raises. Call it before SGLang is imported."""
    from transformers.utils import import_utils

    original = import_utils._LazyModule.__getattr__
    placeholder = _Placeholder(_NAME, (), {"shims": shims})

    def attribute(module: Any, name: str) -> Any:
        # transformers makes its own module object twice: an attribute of the first would be lost
        if name == _NAME and name in getattr(module, "_object_missing_backend", ()):
            return placeholder
        return original(module, name)

    import_utils._LazyModule.__getattr__ = attribute


class _Placeholder(type):
    """Class of the stand-in. It takes registrations, says so once, and has nothing else."""

    shims: list[str]

    def register(cls, *_args: object, **_kwargs: object) -> None:
        shim = f"transformers.{_NAME}.register: does nothing"
        if shim not in cls.shims:
            cls.shims.append(shim)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise StubCalled(f"transformers.{_NAME}.{name} was asked for, and there is no torchvision here")
