"""What is imported before any SGLang, and is the same for all of them: torch, transformers, what else SGLang imports of others,
and what takes the place of what a CPU lacks. Called by ancestor.py, and by boot.py where no ancestor has done it."""

import contextlib
import hashlib
import importlib.machinery
import marshal
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec.structs
import torch
import torch.compiler

from eagletwin.harness.core.files import cache_folder
from eagletwin.harness.core.run_spec import CPU, Mode
from eagletwin.harness.engines.inside.own_loader import SourceFinder, import_early

from ..stand_ins import stubs
from . import cuda

# The names in transformers' models, which it looks for in their source twice at each import, remembered on disk.
#
# That saves 0.4 s of a start. They are remembered for as long as no file that they were read from is added, edited or taken
# away.


_MODULE = "transformers.utils.import_utils"


def remember_names(shims: list[str]) -> None:
    """Before transformers is imported."""
    sys.meta_path.insert(0, SourceFinder({_MODULE: _Loader}.get))
    shims.append(f"{_MODULE}: the names in its models are remembered from start to start")


class _Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: types.ModuleType) -> None:
        """Run the module, and replace its function that looks for names."""
        super().exec_module(module)
        find = "define_import_structure"
        if hasattr(module, find):
            look = getattr(module, find)

            def look_once(module_path: Any, prefix: str | None = None) -> Any:
                place = Path(module_path)
                folder = place if place.is_dir() else place.parent
                return _load_or_compute(f"{module_path} {prefix}", folder, lambda: look(module_path, prefix))

            setattr(module, find, look_once)


def _load_or_compute(name: str, folder: Path, work_out: Callable[[], Any]) -> Any:
    """What work_out() returned when the source below this folder was as it is now: plain dicts, sets and strings."""
    key = repr((name, sys.version, sorted(_state(str(folder))))).encode()
    file = cache_folder("imports") / hashlib.sha256(key).hexdigest()
    with contextlib.suppress(OSError, EOFError, ValueError, TypeError):
        return marshal.loads(file.read_bytes())
    found = work_out()
    with contextlib.suppress(OSError, ValueError):  # a start without it is slower, and nothing else
        scratch = file.with_name(f".{file.name}.{os.getpid()}")
        scratch.write_bytes(marshal.dumps(found))
        scratch.replace(file)
    return found


def _state(folder: str) -> Iterator[tuple[str, int, int]]:
    """(path, time of the last change in nanoseconds, size in bytes) of each source file below a folder."""
    for entry in os.scandir(folder):
        if entry.is_dir():
            yield from _state(entry.path)
        elif entry.name.endswith(".py"):
            state = entry.stat()
            yield entry.path, state.st_mtime_ns, state.st_size


# What SGLang and transformers work out anew for every engine, and never differently: a seventh of the time of a build.
#
# SGLang asks msgspec for the fields of its ServerArgs several times, which evaluates each annotation; transformers writes down
# every configuration that it reads, for a log that is off.


def memoize(shims: list[str]) -> None:
    """After transformers is imported."""
    _remember_fields(shims)
    _leave_configurations_unwritten(shims)


def _remember_fields(shims: list[str]) -> None:
    work_out = msgspec.structs.fields
    known: dict[type, tuple[msgspec.structs.FieldInfo, ...]] = {}

    def fields(type_or_instance: Any) -> tuple[msgspec.structs.FieldInfo, ...]:
        if not isinstance(type_or_instance, type):
            return work_out(type_or_instance)
        if type_or_instance not in known:
            known[type_or_instance] = work_out(type_or_instance)
        return known[type_or_instance]

    msgspec.structs.fields = fields
    shims.append("msgspec.structs.fields: what it finds is remembered")


def _leave_configurations_unwritten(shims: list[str]) -> None:
    from transformers import configuration_utils

    for name in ("PreTrainedConfig", "PretrainedConfig"):  # before transformers 5
        if hasattr(configuration_utils, name):
            getattr(configuration_utils, name).__repr__ = _describe_configuration
            shims.append(f"transformers' {name}.__repr__: the class alone")
            return


def _describe_configuration(configuration: object) -> str:
    return f"{type(configuration).__name__} of {getattr(configuration, 'model_type', 'no type')}"


# torch.compile where it is turned off: its decorators give the function back, and torch's compiler stays out of the process.
#
# TORCHDYNAMO_DISABLE has the same effect, but the decorators then import some 700 modules: a sixth of a start, and memory that
# every fork copies.


def leave_out_dynamo(shims: list[str]) -> None:
    """Before SGLang and transformers are imported, in a process that was started with TORCHDYNAMO_DISABLE."""
    torch.compile = torch.compiler.disable = _given_back  # type: ignore[assignment]
    torch.compiler.assume_constant_result = _given_back  # type: ignore[assignment]
    if "_dynamo" not in vars(torch):  # torch imports it when it is first asked for; so does this, but for the decorator
        torch._dynamo = _Unloaded()  # type: ignore[assignment]
    given_back = "torch.compile, torch.compiler.disable, torch.compiler.assume_constant_result, torch._dynamo.disable"
    shims.append(f"{given_back}: give the function back")


def _given_back(function: Callable[..., Any] | None = None, *_: Any, **named: Any) -> Any:
    for name in ("model", "fn"):  # what torch.compile calls it, and what disable does
        function = named.get(name, function)
    return _given_back if function is None else function


class _Unloaded:
    """torch._dynamo until anything else in it is asked for. An import of it, or of a part of it, puts it in this place."""

    disable = staticmethod(_given_back)

    def __getattr__(self, name: str) -> Any:
        if torch.__dict__.get("_dynamo") is self:
            del torch._dynamo
        import torch._dynamo as loaded

        return getattr(loaded, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__getattr__("__name__")  # what is set here would be lost once it is loaded
        setattr(sys.modules["torch._dynamo"], name, value)


# What was changed. Nobody undoes it: a process that prepares itself runs SGLang for us alone, one configuration in each fork.
SHIMS: list[str] = []

# Packages, and parts of them, that an import of SGLang is long in. What a release does not need costs a little, once.
_NAMES = (
    *("transformers.models.auto", "transformers.processing_utils", "transformers.tokenization_utils_fast"),
    *("triton.language", "torch.distributed", "torch.multiprocessing", "torch.nn.functional", "torch.profiler"),
    *("PIL.Image", "einops", "fsspec", "orjson", "partial_json_parser", "psutil", "pybase64", "pydantic", "requests"),
    *("sentencepiece", "starlette.responses", "tiktoken", "tvm_ffi", "xgrammar", "zmq.asyncio"),
    # in engines, and at their first case
    *("multiprocessing.synchronize", "numpy.ctypeslib", "numpy.ma", "tomllib", "torch.profiler._cupti_monitor"),
    "torch.utils._device",
)


def prepare(mode: Mode = CPU, *, idle: tuple[str, ...] = stubs.IDLE, spare: tuple[str, ...] = ()) -> None:
    """Once per process, in front of what SGLang imports.

    On a CPU: idle: its modules that are never called; spare: packages that it imports, and that a host may lack."""
    if SHIMS:
        return
    torch.set_num_threads(1)
    if mode.device == "cpu":
        leave_out_dynamo(SHIMS)
    remember_names(SHIMS)
    ask_transformers()
    memoize(SHIMS)
    stubs.let_image_processors_register(SHIMS)
    if mode.device == "cuda":
        cuda.prepare(SHIMS, mode)
        return
    stubs.install((*stubs.GPU, *cuda.absent(*idle, *spare, "xgrammar")), idle)
    torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.cuda.empty_cache = lambda: None
    # called on CPU tensors by code that overlaps streams; there is one stream here
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign,assignment]
    SHIMS.append("torch.cuda.synchronize, torch.cuda.empty_cache, Tensor.record_stream: do nothing")


def import_them() -> None:
    """For engines on a CPU."""
    prepare()
    import_early(_NAMES, SHIMS)


def ask_transformers() -> None:
    """Have transformers look for what is about to be stubbed: it looks once, keeps the answer, and would find the stubs."""
    from transformers.utils import import_utils

    for name in dir(import_utils):
        if name.startswith(("is_torchaudio", "is_torchcodec", "is_torchvision")) and name.endswith("_available"):
            getattr(import_utils, name)()
