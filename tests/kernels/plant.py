"""Planted faults: one expression of one SGLang function replaced, in memory, for the length of a block.

A kernel is a jit function whose source this project's runtime, or Triton's interpreter, takes from `inspect`; so its stand-in
is a function with a source of its own. A plain function gets another code object, as engines/sglang/patches.py does it.
Only what release.py has imported can be edited.
"""

import __future__

import ast
import inspect
import linecache
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from eagletwin.harness.engines.sglang import patches
from eagletwin.harness.patch import Edit


@contextmanager
def planted(edit: Edit) -> Iterator[None]:
    """SGLang with this edit. Raises PatchFailed if the text to replace does not occur exactly once."""
    kernel = kernel_at(edit.target)
    if kernel is not None:
        source = _source(kernel.fn)
        if source.count(edit.match) != 1:
            raise patches.PatchFailed(f"{edit.target}: {edit.match!r} occurs {source.count(edit.match)} times, not once")
        with _replaced(kernel, source.replace(edit.match, edit.replacement), f"planted: {edit.replacement}"):
            yield
        return
    function = patches._resolve(edit.target)
    code, before = function.__code__, patches.edited.copy()
    try:
        patches._edit(edit)
        yield
    finally:
        function.__code__ = code
        patches.edited[:] = before


@contextmanager
def silenced(target: str) -> Iterator[None]:
    """SGLang with a kernel that does nothing."""
    kernel = kernel_at(target)
    definition = ast.parse(_source(kernel.fn)).body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.body = [ast.Pass()]
    with _replaced(kernel, ast.unparse(definition), "silenced"):
        yield


def kernel_at(target: str) -> Any:
    """The jit function of this dotted name; None if it is another kind of function."""
    module, _, name = target.rpartition(".")
    found = getattr(sys.modules.get(module), name, None)
    return found if hasattr(found, "fn") else None


def _source(fn: Any) -> str:
    """Source of a kernel's Python function, without its decorator."""
    source = textwrap.dedent(inspect.getsource(fn))
    return source[source.index("def ") :]


@contextmanager
def _replaced(kernel: Any, source: str, why: str) -> Iterator[None]:
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
