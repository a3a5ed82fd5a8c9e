"""SGLang's bytecode, kept by the content of its source. Called by zygote.py, worker.py and the kernel tier before SGLang is
imported, where it is not the installed one.

Python keeps bytecode by the place of the source, and trusts it by the source's time and size. Two versions of a tree can share
all of these (a copy that keeps times, an edit of one digit), and the name of the tree goes by content: the old code would run
under the new name. Here the name of the file is a digest of the source. So a module is compiled once, in whatever tree or
release it lies: a tree seen for the first time starts as soon as one that was seen before.
"""

import _imp
import contextlib
import hashlib
import importlib.machinery
import importlib.util
import marshal
import sys
import types

from eagletwin.harness.core.files import cache_folder

from .source_finder import SourceFinder


def install() -> None:
    """Before SGLang is imported, and before what replaces loaders of single modules, which goes first."""
    sys.meta_path.insert(0, SourceFinder(lambda name: Loader if name.partition(".")[0] == "sglang" else None))


class Loader(importlib.machinery.SourceFileLoader):
    """Loads a module from bytecode that was made of this very source, or from the source."""

    def get_code(self, fullname: str) -> types.CodeType:
        file = self.get_filename(fullname)
        source = self.get_data(file)
        digest = hashlib.sha256(importlib.util.MAGIC_NUMBER + source).hexdigest()
        cached = str(cache_folder("bytecode") / "by-content" / digest)
        code: types.CodeType
        with contextlib.suppress(OSError, EOFError, ValueError, TypeError):  # absent or damaged
            code = marshal.loads(self.get_data(cached))
            # it may have been compiled where the same source lay before; typeshed does not know what importlib calls for that
            _imp._fix_co_filename(code, file)  # type: ignore[attr-defined]
            return code
        code = self.source_to_code(source, file)
        self.set_data(cached, marshal.dumps(code))
        return code
