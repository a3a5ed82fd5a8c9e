"""Planted faults: one expression of one SGLang function replaced, in memory, for the length of a block.

A kernel is a jit function whose source this project's runtime, or Triton's interpreter, takes from `inspect`; so its stand-in
is a function with a source of its own. A plain function gets another code object, as engines/sglang/patches.py does it.
Only what release.py has imported can be edited.
"""

import inspect
import linecache
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from eagletwin.harness.engines.sglang import patches
from eagletwin.harness.patch import Edit


@contextmanager
def planted(edit: Edit) -> Iterator[None]:
    """SGLang with this edit. Raises PatchFailed if the text to replace does not occur exactly once."""
    module, _, name = edit.target.rpartition(".")
    kernel = getattr(sys.modules.get(module), name, None)
    if hasattr(kernel, "fn"):
        original, kernel.fn = kernel.fn, _mutated(kernel.fn, edit)
        try:
            yield
        finally:
            kernel.fn = original
        return
    function = patches._resolve(edit.target)
    code, before = function.__code__, patches.edited.copy()
    try:
        patches._edit(edit)
        yield
    finally:
        function.__code__ = code
        patches.edited[:] = before


def _mutated(fn: Any, edit: Edit) -> FunctionType:
    """A kernel's Python function, compiled again from an edited source that `inspect` can find."""
    source = textwrap.dedent(inspect.getsource(fn))
    source = source[source.index("def ") :]  # without its decorator
    if source.count(edit.match) != 1:
        raise patches.PatchFailed(f"{edit.target}: {edit.match!r} occurs {source.count(edit.match)} times, not once")
    source = source.replace(edit.match, edit.replacement)
    file = f"<{edit.target}, planted: {edit.replacement}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    scope: dict[str, Any] = {}
    exec(compile(source, file, "exec", dont_inherit=True, flags=fn.__code__.co_flags & 0x1000000), fn.__globals__, scope)
    mutated = scope[fn.__name__]
    assert isinstance(mutated, FunctionType)
    return mutated
