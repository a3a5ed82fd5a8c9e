"""Archives of a bundle: tar, compressed by zstd. The same files give the same bytes, so a part that has arrived stays valid.

A finished archive of wheels stays in the cache by what went into it: a run that broke off goes on with the next archive.
It is zstd, and not xz: 2.5 GB are packed in minutes and not in an hour, for a fifth more bytes.
"""

import importlib
import os
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .wheels import wheel

# Of twice the time (level 15) the archives become 1 % smaller, of seven times (level 17) 8 %: measured on libtorch_cpu.so.
LEVEL = 12
WINDOW = 27  # log2 of the bytes over which repetitions are found: kernels of a library resemble each other over long distances
_CODEC = "backports-zstd"


def codec(pins: dict[str, tuple[str, ...]], python: str) -> Path:
    """The wheel of zstd for this Python, by the lock's pins; `use` imports it."""
    [pin] = [pin for pin in pins if pin.startswith(f"{_CODEC}==")]
    return wheel(pin, pins[pin], python)


def use(decoder: Path, kept: Path) -> Any:
    """The module of a wheel that `codec` returned, imported from a folder of its own in `kept`."""
    folder = kept / decoder.stem
    if not folder.is_dir():
        with zipfile.ZipFile(decoder) as archive:
            archive.extractall(folder)
    sys.path.insert(0, str(folder))
    return importlib.import_module("backports.zstd")


def pack(zstd: Any, archive: Path, files: Iterable[tuple[str, Path]]) -> None:
    """Write an archive of these files, each by its name in it. It has its name only when it is whole."""
    unfinished = archive.with_name(f"{archive.name}.unfinished")
    parameter = zstd.CompressionParameter
    options = {
        parameter.compression_level: LEVEL,
        parameter.window_log: WINDOW,
        parameter.enable_long_distance_matching: 1,
        parameter.nb_workers: os.cpu_count() or 1,
        parameter.checksum_flag: 1,
    }
    with zstd.ZstdFile(unfinished, "w", options=options) as stream, tarfile.open(fileobj=stream, mode="w|") as tar:
        for name, path in sorted(files):
            tar.add(path, name, recursive=False, filter=_without_circumstances)
    unfinished.replace(archive)


def _without_circumstances(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """A file's name, kind, content and whether it can be run; not when and by whom it was unpacked here."""
    member.mtime = member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mode = 0o755 if member.mode & 0o100 else 0o644
    return member
