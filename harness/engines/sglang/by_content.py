"""SGLang's bytecode, trusted by the content of its source. Called by zygote.py, worker.py and the kernel tier before SGLang is
imported, where it is not the installed one.

Python trusts bytecode by the time and the size of the source. Two versions of a tree can share both (a copy that keeps times,
an edit of one digit), and the name of the tree goes by content: the old code would run under the new name. The bytecode here
is PEP 552's, which holds a hash of its source.
"""

import contextlib
import importlib.machinery
import importlib.util
import marshal
import sys
import types

from .source_finder import SourceFinder

_CHECKED = (0b11).to_bytes(4, "little")  # by hash, and the source is to be looked at


def install() -> None:
    """Before SGLang is imported, and before what replaces loaders of single modules, which goes first."""
    sys.meta_path.insert(0, SourceFinder(lambda name: Loader if name.partition(".")[0] == "sglang" else None))


class Loader(importlib.machinery.SourceFileLoader):
    """Loads a module from bytecode that was made of this very source, or from the source."""

    def get_code(self, fullname: str) -> types.CodeType:
        file = self.get_filename(fullname)
        source, cached = self.get_data(file), importlib.util.cache_from_source(file)
        head = importlib.util.MAGIC_NUMBER + _CHECKED + importlib.util.source_hash(source)
        with contextlib.suppress(OSError, EOFError, ValueError, TypeError):  # absent or damaged
            data = self.get_data(cached)
            if data.startswith(head):
                code: types.CodeType = marshal.loads(memoryview(data)[len(head) :])
                return code
        code = self.source_to_code(source, file)
        self.set_data(cached, head + marshal.dumps(code))
        return code
