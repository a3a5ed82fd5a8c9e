"""Run test files of findings, one after another, and write what came of each: `python run_test.py`.

A line of its input names one: the test, the checkout, a file for the result and one for what is said on stderr, as a list in
JSON. It is run in a fork of this process, which has imported torch, what else SGLang imports of others, and no engine: that
takes more than half of the time of an import of SGLang. A line of its output says that the fork has ended.

Modules of the engine that lie in the checkout (`python/sglang/...`, `vllm/...`) are imported from there, all others from the
release. A test is of unittest, as SGLang's are, or a function of the module, as vLLM's are.
SGLang imports torchvision wherever it is imported, for image models alone. Where it is absent, a stand-in whose names are empty
classes takes its place. eagletwin cannot be imported here: what upstream takes must not need it.
"""

import contextlib
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import traceback
import types
import unittest
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

ABSENT = "torchvision"
OTHERS = (
    *("transformers.models.auto", "transformers.processing_utils", "transformers.tokenization_utils_fast", "triton.language"),
    *("torch.distributed", "torch.multiprocessing", "torch.profiler", "PIL.Image", "einops", "fsspec", "msgspec", "numpy.ma"),
    *("orjson", "partial_json_parser", "psutil", "pybase64", "pydantic", "requests", "sentencepiece", "tiktoken"),
    "zmq.asyncio",
)


class EmptyType(type):
    """Class of empty classes: any public attribute is another one."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return EmptyType(name, (), {})


class EmptyModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return EmptyType(name, (), {})


class StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002  the import system's signature
        target: types.ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] == ABSENT:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return EmptyModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class Checkout(importlib.abc.MetaPathFinder):
    """Finds the modules that the patch changes."""

    def __init__(self, place: Path) -> None:
        files = sorted(place.rglob("*.py"))
        self.files = {".".join(file.relative_to(place).with_suffix("").parts): file for file in files}

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002  the import system's signature
        target: types.ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        file = self.files.get(fullname)
        return file and importlib.util.spec_from_file_location(fullname, file)


def stand_in() -> None:
    """transformers looks for torchvision once and keeps the answer: it looks before there is something to find."""
    if importlib.util.find_spec(ABSENT) is None:
        from transformers.utils import import_utils

        for name in dir(import_utils):
            if name.startswith("is_torchvision") and name.endswith("_available"):
                getattr(import_utils, name)()
        sys.meta_path.append(StandIn())


def names(found: list[tuple[Any, str]]) -> list[str]:
    """Of the tests, each once: one with parts that fail is listed for each of them."""
    return sorted({one.id().removeprefix("finding.").partition(" ")[0] for one, _ in found})


def run(test: str, checkout: str, result: str) -> None:
    below = Path(checkout) / "python"
    patched = Checkout(below if below.is_dir() else Path(checkout))
    sys.meta_path.insert(0, patched)
    spec = importlib.util.spec_from_file_location("finding", test)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["finding"] = module
    spec.loader.exec_module(module)
    gc.freeze()
    gc.enable()
    suite = unittest.defaultTestLoader.loadTestsFromModule(module)
    functions = [value for name, value in vars(module).items() if name.startswith("test_") and callable(value)]
    suite.addTests(map(unittest.FunctionTestCase, functions))
    outcome = unittest.TextTestRunner().run(suite)
    said = {
        "ran": outcome.testsRun,
        "failures": names(outcome.failures),
        "errors": names(outcome.errors),
        "skipped": names(outcome.skipped),
        "imported": [name for name in patched.files if name in sys.modules],
    }
    with open(result, "w", encoding="utf-8") as file:
        json.dump(said, file)


def alone(test: str, checkout: str, result: str, said: str) -> NoReturn:
    """The fork's: as a process of its own would, in the checkout."""
    code = 1
    try:
        os.chdir(checkout)
        for number, file in enumerate((os.devnull, os.devnull, said)):
            opened = os.open(file, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(opened, number)
            os.close(opened)
        run(test, checkout, result)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # what Python does besides takes down torch, for a third of a second


def main() -> None:
    sys.modules["eagletwin"] = None  # type: ignore[assignment]
    gc.disable()  # imports make much that lives for ever; collecting it costs seconds
    import torch  # noqa: F401

    stand_in()
    for name in OTHERS:
        with contextlib.suppress(Exception):  # what needs it imports it again, and gets the error
            importlib.import_module(name)
    gc.freeze()  # pages that forks share are not touched
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            alone(*json.loads(line))
        os.waitpid(child, 0)
        print(flush=True)


if __name__ == "__main__":
    main()
