"""The runtime that executes the kernels of the tier, the errors that it raises, and the faults that are planted for it.

Imports Triton: only the process that runs the tier needs it.
"""

import __future__

import ast
import inspect
import linecache
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from eagletwin.harness.core.patch import Edit
from eagletwin.harness.core.run_spec import Kernels
from eagletwin.harness.engines import triton_cpu
from eagletwin.harness.engines.inside import patches
from eagletwin.harness.engines.inside.violations import CHECKS

from .release import find

WRONG = (AssertionError, triton_cpu.KernelViolation)
"""What says that SGLang is wrong. Any other exception says that the comparison was not made."""

LIVE = triton_cpu.LivePools()  # what raw addresses may reach: a property registers its KV pools for as long as it holds


@contextmanager
def running(kernels: Kernels = "fast") -> Iterator[None]:
    """Run kernels as asked; torch.empty returns poison, so that an output which was never written cannot pass."""
    with triton_cpu.poison_empty():
        if kernels == "interpreter":
            yield
            return
        with triton_cpu.installation(CHECKS[kernels], LIVE):
            yield


# Planted faults: one expression of one SGLang function replaced, in memory, for the length of a block.
#
# A kernel is a jit function whose source this project's runtime, or Triton's interpreter, takes from `inspect`; so its stand-
# in is a function with a source of its own. A plain function gets another code object, as engines/inside/patches.py does it. A
# function is edited where the SGLang of this process has it (release.find).


@contextmanager
def plant_fault(edit: Edit) -> Iterator[None]:
    """SGLang with this edit. Raises PatchFailed if the text to replace does not occur exactly once, and what find() raises."""
    where, found = find(edit.target)
    edit = msgspec.structs.replace(edit, target=where)
    if hasattr(found, "fn"):
        source = _source(found.fn)
        if source.count(edit.match) != 1:
            raise patches.PatchFailed(f"{edit.target}: {edit.match!r} occurs {source.count(edit.match)} times, not once")
        with _replace_source(found, source.replace(edit.match, edit.replacement), f"planted: {edit.replacement}"):
            yield
        return
    function = patches._resolve(edit.target)
    code = function.__code__
    try:
        patches.rewrite(edit)
        yield
    finally:
        function.__code__ = code


@contextmanager
def silence_function(target: str) -> Iterator[None]:
    """SGLang with a function that does nothing: a fault that fits every source. Raises what find() raises."""
    where, found = find(target)
    if not hasattr(found, "fn"):
        function = patches._resolve(where)
        code = function.__code__
        function.__code__ = _nothing(code.co_freevars).__code__
        try:
            yield
        finally:
            function.__code__ = code
        return
    definition = ast.parse(_source(found.fn)).body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.body = [ast.Pass()]
    with _replace_source(found, ast.unparse(definition), "silenced"):
        yield


def _nothing(free: tuple[str, ...]) -> Any:
    """A function that takes anything and returns None, with the free variables of the one that it replaces."""
    if not free:
        return lambda *_args, **_kwargs: None
    scope: dict[str, Any] = {}
    names = ", ".join(free)
    exec(f"def maker({names}):\n def nothing(*_args, **_kwargs):\n  if False: ({names},)\n return nothing", scope)
    return scope["maker"](*free)


def _source(fn: Any) -> str:
    """Source of a kernel's Python function, without its decorator."""
    source = textwrap.dedent(inspect.getsource(fn))
    return source[source.index("def ") :]


@contextmanager
def _replace_source(kernel: Any, source: str, why: str) -> Iterator[None]:
    """The kernel with another source, which `inspect` can find."""
    original = kernel.fn
    file = f"<{original.__module__}.{original.__name__}, {why}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    flags = original.__code__.co_flags & __future__.annotations.compiler_flag
    scope: dict[str, Any] = {}
    exec(compile(source, file, "exec", dont_inherit=True, flags=flags), original.__globals__, scope)
    kernel.fn = scope[original.__name__]
    try:
        yield
    finally:
        kernel.fn = original
        del linecache.cache[file]
