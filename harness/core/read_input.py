"""Files of strangers, read: a regular file alone, and JSON in which no key is given twice."""

import errno
import json
import stat
from pathlib import Path
from typing import Any

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
