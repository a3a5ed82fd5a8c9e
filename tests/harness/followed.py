"""Edits of a small package, each in two ways: followed by a fork of a process that has imported it, and imported anew.

`python -m tests.harness.followed` prints {name: [what the fork says, what the import says]}; of `watched`, what either notes. A
fork that has to import it says why.
"""

import gc
import importlib
import inspect
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from eagletwin.harness.engines.difference import File, difference
from eagletwin.harness.engines.inside import changes, own_loader
from eagletwin.harness.engines.protocol import CannotFollow

FILES = {
    "toy/__init__.py": "",
    "toy/helpers.py": '''
"""Helpers."""
import functools
import inspect

LIMIT = 4
IN_IMPORT = []


def keep(function):
    function.kept = True
    return function


def around(function):
    @functools.wraps(function)
    def call(*args):
        return function(*args) + 1

    return call


def listed():
    IN_IMPORT.append("listed")


def read():
    return "read"


SOURCE = inspect.getsource(read)


@functools.lru_cache
def cached(x):
    return x + LIMIT


def double(x, by=2):
    return by * x


def gone(x):
    return x


gone = None
listed()
''',
    "toy/work.py": """
from .helpers import LIMIT, around, cached, double as twice, keep, read
import triton

try:
    from . import extra
except ImportError:
    extra = None


@triton.jit
def kernel(x):
    return x + 1


class Base:
    SIZE = 3

    def size(self):
        return self.SIZE

    @property
    def large(self):
        return self.size() > 2


class Work(Base):
    def size(self):
        def more(x):
            return x + 1

        return more(twice(self.SIZE))

    def plain(self):
        return 1

    @staticmethod
    def fixed():
        return 5

    @keep
    def registered(self):
        return 6

    @around
    def wrapped(self):
        return 7


def numbers():
    return [1, 2]


def fails():
    raise ValueError("as it does")


class Held:
    call = numbers


held = {"numbers": numbers, "lambda": lambda: 3}


def answer():
    work = Work()
    return [
        *(work.size(), work.large, work.plain(), work.fixed(), work.registered(), work.wrapped()),
        *(list(held["numbers"]()), list(Held.call()), held["lambda"](), twice(4), cached(2), LIMIT, read(), extra is None),
        kernel.fn.__code__.co_firstlineno,
    ]
""",
}
HELPERS, WORK = "toy/helpers.py", "toy/work.py"
# name -> (file, what is edited, what it becomes); of FOLLOWED a fork comes to what an import comes to, the rest is imported
FOLLOWED = {
    "nothing": (WORK, "", ""),
    "a body": (WORK, "return 1\n", "return 11\n"),
    "a body above others": (WORK, "return self.SIZE\n", "size = self.SIZE\n        return size\n"),
    "a comment": (WORK, "import triton\n", "import triton  # here\n\n\n"),
    "a docstring": (HELPERS, '"""Helpers."""', '"""Helpers of\n\n\nothers."""'),
    "a function in another": (WORK, "return x + 1\n\n        return more", "return x + 10\n\n        return more"),
    "a new function in another": (WORK, "return [1, 2]", "def more():\n        return 3\n\n    return [1, more()]"),
    "a static method": (WORK, "return 5", "return 50"),
    "a property": (WORK, "self.size() > 2", "self.size() > 200"),
    "a cached function": (HELPERS, "return x + LIMIT", "return x - LIMIT"),
    "a function with another name elsewhere": (HELPERS, "return by * x", "return 3 * by * x"),
    "a function that others hold": (WORK, "return [1, 2]", "return [1, 2, 3]"),
    "an import in a body": (WORK, "return 1\n", "from .late import ONE\n\n        return ONE\n"),
    "a name that is not there": (WORK, "return 1\n", "return absent\n"),
}
IMPORTED = {
    "a constant": (HELPERS, "LIMIT = 4", "LIMIT = 5"),
    "an attribute of a class": (WORK, "SIZE = 3", "SIZE = 30"),
    "a default": (HELPERS, "by=2", "by=20"),
    "an unknown decorator": (WORK, "return 6", "return 60"),
    "a decorator": (HELPERS, "function(*args) + 1", "function(*args) + 100"),
    "a function with such a decorator": (WORK, "return 7", "return 70"),
    "a base": (WORK, "class Work(Base)", "class Work(Base, object)"),
    "a new method": (WORK, "    def plain", "    def more(self):\n        return 0\n\n    def plain"),
    "a new function": (WORK, "def answer():", "def read():\n    return 0\n\n\ndef answer():"),
    "a new import": (WORK, "import triton\n", "import triton\nfrom .late import ONE as LIMIT\n"),
    "a function that is gone": (WORK, "    def plain(self):\n        return 1\n", ""),
    "a method that is gone and inherited": (
        WORK,
        "    def size(self):\n        def more(x):",
        "    def bigger(self):\n        def more(x):",
    ),
    "a lambda": (WORK, "lambda: 3", "lambda: 30"),
    "a kernel": (WORK, "return x + 1\n\n\nclass", "return x + 2\n\n\nclass"),
    "a function that the import ran": (HELPERS, '("listed")', '("other")'),
    "a function whose source the import read": (HELPERS, 'return "read"', 'return "reads"'),
    "a function that has no name any more": (HELPERS, "def gone(x):\n    return x", "def gone(x):\n    return -x"),
    "a body that calls super": (WORK, "return 1\n", "return super().size()\n"),
    "a generator": (WORK, "return [1, 2]", "yield 1"),
    "an order": (HELPERS, "gone = None\nlisted()\n", "listed()\ngone = None\n"),
    "what eagletwin decides by the source": (WORK, "return 1\n", "return 1  # cuda\n"),
    "a module that was looked for": ("toy/extra.py", None, ""),
    "a syntax error": (WORK, "return 1\n", "return (1\n"),
    "a file that is gone": (WORK, "", None),
}


def edit(root: Path, file: str, old: str | None, new: str | None) -> None:
    """Put the package there, and edit it."""
    for name, text in {**FILES, "toy/late.py": "ONE = 9\n"}.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    (root / "toy/extra.py").unlink(missing_ok=True)
    if new is None:
        (root / file).unlink()
    elif old is None:
        (root / file).write_text(new)
    elif old:
        assert FILES[file].count(old) == 1, old
        (root / file).write_text(FILES[file].replace(old, new))


def answer() -> Any:
    """What the package computes, and where its functions stand."""
    work = importlib.import_module("toy.work")
    found: list[Any] = []
    try:
        found += [work.answer()]
    except Exception as error:
        found += [f"{type(error).__name__}: {error}"]
    try:
        work.fails()
    except ValueError as error:
        found += [[frame.lineno for frame in traceback.extract_tb(error.__traceback__)][1:]]
    return [*found, inspect.getsource(work.numbers), work.Work.size.__code__.co_firstlineno]


def in_fork(call: Callable[[], Any]) -> Any:
    """What a call comes to in a fork of this process."""
    ours, theirs = os.pipe()
    if os.fork() == 0:
        try:
            said = call()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(theirs, json.dumps(said).encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as pipe:
        said = json.loads(pipe.read())
    os.wait()
    return said


def imported() -> Any:
    own_loader.install("toy")
    return answer()


def followed(root: Path, change: tuple[str, str | None, str | None], plan: str = "") -> Any:
    """What a fork comes to that imports the package, and follows the edit."""
    edit(root, WORK, "", "")
    own_loader.install("toy")
    changes.install()
    with changes.followed():
        work = importlib.import_module("toy.work")
        assert not changes.decide(lambda: "cuda" in inspect.getsource(work))
    edit(root, *change)
    importlib.invalidate_caches()
    finders = [*sys.meta_path]
    try:
        changes.follow("toy", "toy 2", str(root), *([plan] if plan else []))
    except CannotFollow as error:
        return f"imported: {error}"
    assert own_loader.version("toy") == "toy 2"
    assert sys.meta_path == finders  # what stands before the files of the tree, as stubs do, still does
    return answer()


def watched(root: Path, *, follow: bool) -> list[list[str]]:
    """Which of the changed statements are noted: of the change of a function that no file had changed in before, and of one
    that stands above it."""
    change = (WORK, "        return 1\n", "        one = 1\n        if one > 1:\n            one = 2\n        return one\n")
    edit(root, *change)
    files = [File(WORK, FILES[WORK].encode(), (root / WORK).read_bytes())]
    plan = root / "plan.json"
    plan.write_bytes(msgspec.json.encode(difference("1", files).watch))
    if follow:
        said = followed(root, change, str(plan))
        assert not isinstance(said, str), said
    else:
        own_loader.install("toy")
        changes.install(str(plan))
        answer()
    differs = changes.differs()
    assert isinstance(differs, msgspec.Struct)
    return [[*differs.executed], [*differs.near]]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root, found = Path(folder), dict[str, list[Any]]()
        sys.path.insert(0, folder)
        sys.dont_write_bytecode = True
        gc.freeze()
        for name, change in (FOLLOWED | IMPORTED).items():
            edit(root, *change)
            expected = in_fork(imported)
            found[name] = [in_fork(partial(followed, root, change)), expected]
        found["watched"] = [in_fork(partial(watched, root, follow=follow)) for follow in (True, False)]
        print(json.dumps(found))


if __name__ == "__main__":
    main()
