"""The SGLang that this very process imports: put in place before the first import, and asked for afterwards. Imports no SGLang.

Engine processes get theirs through PYTHONPATH (start.py). This is for a process that runs already, such as pytest's.
"""

import contextlib
import importlib.util
import sys
from pathlib import Path

from eagletwin.harness.core.errors import HarnessError

from .source import Source

_PACKAGE = "sglang"


def use(source: Source) -> None:
    """Make this process import the SGLang of `source`. Raises HarnessError if it has imported another one."""
    for path in reversed([str(path) for path in source.paths]):
        with contextlib.suppress(ValueError):
            sys.path.remove(path)
        sys.path.insert(0, path)
    expected, module = init_file(source), sys.modules.get(_PACKAGE)
    if module is None or expected is None:
        return
    found = module.__file__
    if found is None or not Path(found).parent.samefile(expected.parent):  # the files themselves may be links to one
        raise HarnessError(
            f"this process has already imported the SGLang in {found}, and the one in {expected} is wanted",
            consequence="nothing was run: the results would be those of another SGLang",
            remedy="run these tests in a process of their own",
        )


def init_file(source: Source) -> Path | None:
    """Path of `sglang/__init__.py` of this SGLang, without importing it. None if it has no such file."""
    if source.paths:
        return source.paths[0] / _PACKAGE / "__init__.py"
    module = sys.modules.get(_PACKAGE)
    if module is not None:
        return Path(module.__file__) if module.__file__ else None
    found = importlib.util.find_spec(_PACKAGE)
    return Path(found.origin) if found is not None and found.origin else None
