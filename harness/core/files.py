"""Files, and this Python: where eagletwin keeps its own files, how strangers' are read, and how a module runs in a process of
its own. Light: it imports no package that it names."""

import errno
import fcntl
import importlib.metadata
import json
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .errors import HarnessError, InputError

# What is installed here. Light: it imports nothing that it names.

ABSENT = "none"


def installed_version(package: str) -> str:
    """Version of an installed package; ABSENT if it is not there."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ABSENT


# How this Python runs a module of eagletwin in a process of its own, which imports nothing from the current folder.

# `-P` keeps the current folder off sys.path. Python 3.10 lacks it: there a line takes the folder away before any import.
_BEFORE_3_11 = "import sys; del sys.path[0], sys.argv[0]; import runpy; runpy.run_module(sys.argv[0], None, '__main__', True)"

# A command line goes on with the module's name and its arguments.
RUN_MODULE: tuple[str, ...] = (sys.executable, *(("-P", "-m") if sys.version_info >= (3, 11) else ("-c", _BEFORE_3_11)))


# Where eagletwin keeps what it can make again (the cache) and what it must not lose (run folders).


def cache_folder(part: str) -> Path:
    """A folder of the cache, made if absent: $EAGLETWIN_CACHE, else $XDG_CACHE_HOME/eagletwin, else ~/.cache/eagletwin."""
    base = os.environ.get("EAGLETWIN_CACHE")
    if not base:
        base = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "eagletwin")
    folder = Path(base).absolute() / part
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HarnessError(
            f"the cache folder {folder} cannot be made: {error.strerror}",
            consequence="an engine cannot start without a place for its model checkpoints",
            remedy="set EAGLETWIN_CACHE to a folder that you may write",
        ) from error
    return folder


def keep_bytecode() -> None:
    """Where Python is not to write bytecode, as in images of containers: keep it in the cache, for this process and those that
    it starts. Each of them would compile torch anew, in five seconds."""
    if sys.dont_write_bytecode:
        with suppress(HarnessError):  # what needs the cache says so
            sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(cache_folder("bytecode"))
            sys.dont_write_bytecode = False
            os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@contextmanager
def alone(file: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Keep other processes that name this lock file out until the block is left, or this process is gone.

    waiting: called first if another process is in the block.
    """
    with file.open("a") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(held, fcntl.LOCK_EX)
        yield


def check_writable(parent: Path) -> Path:
    """The folder, which need not exist. Raises InputError where run folders cannot be made below it: before anything runs."""
    there = next((place for place in (parent, *parent.absolute().parents) if place.exists()), parent)
    if not there.is_dir():
        error: OSError = NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    elif not os.access(there, os.W_OK | os.X_OK):
        error = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    else:
        return parent
    raise _cannot_write(parent, error)


def _cannot_write(parent: Path, error: OSError) -> InputError:
    return InputError(
        f"{parent}: {error.strerror}", consequence="nothing was run", remedy="give --out a folder that you may write"
    )


def new_run_folder(parent: Path, name: str) -> Path:
    """Make and return parent/name, or parent/name-2, -3, … : nothing is ever overwritten. Safe among processes."""
    try:
        os.fspath(parent).encode()
    except UnicodeEncodeError:
        raise InputError(
            f"{os.fsencode(parent)!r} is no text in UTF-8",
            consequence="nothing was run: a folder's name stands in traces, scripts and pages, which are",
            remedy="give --out another folder, or run in one",
        ) from None
    try:
        parent.mkdir(parents=True, exist_ok=True)
        number = 1
        while True:
            folder = parent / (name if number == 1 else f"{name}-{number}")
            try:
                folder.mkdir()
                return folder
            except FileExistsError:
                number += 1
    except OSError as error:
        raise _cannot_write(parent, error) from error


# Files of strangers, read: a regular file alone, and JSON in which no key is given twice.

# What a shell makes of `<(command)`, and standard input: these pipes end.
_PIPES = ("/dev/fd/", "/proc/self/fd/", "/dev/stdin")


def read_input(path: Path, limit: int) -> bytes:
    """Up to `limit` + 1 bytes of a file. Raises OSError, also for what is no regular file: a pipe that nobody writes to would
    be waited for without end, and a device has none."""
    found = path.stat()
    if stat.S_ISREG(found.st_mode) and found.st_size <= limit:
        return path.read_bytes()
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode) and not str(path).startswith(_PIPES):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    with path.open("rb") as file:
        return file.read(limit + 1)


def refuse_duplicates(data: bytes) -> None:
    """Raises ValueError if a key of an object is given twice in this JSON: all but the last would be dropped in silence. Of
    what is no JSON nothing is said."""
    try:
        json.loads(data, object_pairs_hook=_once)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        return


def _once(pairs: list[tuple[str, Any]]) -> None:
    seen = set()
    for key, _ in pairs:
        if key in seen:
            raise ValueError(f"the key {key!r} is given twice")
        seen.add(key)
