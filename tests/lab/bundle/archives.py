"""What goes into a bundle: wheels, their libraries for one GPU alone, and archives of both."""

import hashlib
import importlib
import mmap
import os
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagletwin.harness.core.errors import HarnessError
from eagletwin.harness.core.files import cache_folder

# The wheels of a list of pins, for the Python of a GPU host: downloaded once through pip, by their digests, and kept.
#
# A wheel that is in the cache is not downloaded again, so a download that broke off goes on where it was.

# pip takes a wheel of one of these tags, and knows no "or older"
_PLATFORMS = (
    *(f"manylinux_2_{number}_x86_64" for number in (*range(39, 16, -1), 12, 5)),
    *(f"manylinux{year}_x86_64" for year in ("2014", "2010", "1")),
)


def requirements(lock: Path) -> dict[str, tuple[str, ...]]:
    """name==version -> sha256 of the files that may serve it."""
    lines = (line.split() for line in lock.read_text(encoding="utf-8").replace("\\\n", "").splitlines())
    return {pin: tuple(word.removeprefix("--hash=sha256:") for word in hashes) for pin, *hashes in lines}


def wheel(requirement: str, digests: tuple[str, ...], python: str) -> Path:
    """The wheel of name==version for this Python on Linux. HarnessError where pip has no file of these digests."""
    name, _, version = requirement.partition("==")
    kept = cache_folder("wheels")
    pattern = f"{re.sub('[-.]', '_', name)}-{version}-*.whl"
    for found in kept.glob(pattern):
        if _runs_on(found, python) and digest(found) in digests:
            return found
    with tempfile.TemporaryDirectory(dir=kept) as scratch:
        wanted = Path(scratch) / "requirements.txt"
        wanted.write_text(f"{requirement} {' '.join(f'--hash=sha256:{one}' for one in digests)}\n", encoding="utf-8")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
        command += ["--require-hashes", "--implementation", "cp", "--dest", scratch, "--requirement", str(wanted)]
        command += ["--python-version", python]
        command += [word for platform in _PLATFORMS for word in ("--platform", platform)]
        if subprocess.run(command, check=False).returncode != 0:
            raise HarnessError(
                f"pip cannot download {requirement} for Python {python}",
                consequence="the bundle was not packed",
                remedy=f"look at pip's own message, or put the wheel into {kept}",
            )
        [found] = Path(scratch).glob("*.whl")
        return found.replace(kept / found.name)


def digest(file: Path) -> str:
    """sha256 of a file."""
    total = hashlib.sha256()
    with file.open("rb") as opened:
        while block := opened.read(1 << 20):
            total.update(block)
    return total.hexdigest()


def _runs_on(file: Path, python: str) -> bool:
    """Whether a wheel's tags fit: its own Python or any, or the stable interface of an older one."""
    tag, interface = file.stem.split("-")[-3:-1]
    own = "cp" + python.replace(".", "")
    if interface == "abi3":
        return int(tag.removeprefix("cp3").split(".")[0]) <= int(own.removeprefix("cp3"))
    return own in tag.split(".") or tag.startswith("py")


# Empty what one GPU does not need of a library with CUDA code: machine code of other GPUs, symbols, debug information.
#
# Bytes become zeros in place, so every offset of the file stays valid, and what is empty compresses to nothing. The format of
# fat binaries is in no public header: a container begins with a magic number, and holds one entry for each architecture. What
# does not look so is an error, since a library that was emptied wrongly would fail on the GPU only.

_ELF = b"\x7fELF\x02\x01"  # of 64 bits, little endian
_MAGIC = 0xBA55ED50
_PTX, _CUBIN = 1, 2  # kinds of entry: assembly that the driver compiles, and machine code
_SMALLEST_ENTRY = 48  # bytes of its header, of which the last that is read here ends at 32
_SYMBOLS, _STRINGS, _IS_LOADED = 2, 3, 2  # section types SHT_SYMTAB and SHT_STRTAB, flag SHF_ALLOC
_FAT, _RELOCATABLE = ".nv_fatbin", "__nv_relfatbin"  # the second is what device code of other libraries would be linked with


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What stays of a library. sources: only kernels that name their .cu file, and whose file this pattern matches in full."""

    arch: int
    sources: str = ""


@dataclass(frozen=True, slots=True)
class _Section:
    name: str
    kind: int
    is_loaded: bool
    begin: int
    size: int


def is_library(file: Path) -> bool:
    """Whether a file is a library with symbols or GPU code to empty: ELF of 64 bits, by its name one that is loaded."""
    if ".so" not in file.suffixes and not file.name.endswith(".so"):
        return False
    with file.open("rb") as opened:
        return opened.read(6) == _ELF


def slim(file: Path, kept: Kept) -> tuple[int, int]:
    """Empty the file in place. Returns the bytes of GPU code that stay, and all that were emptied. Raises HarnessError."""
    stay, gone = 0, 0
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as image:
        try:
            for section in list(_sections(image)):
                if section.name in (_FAT, _RELOCATABLE):
                    for kind, arch, begin, size in _entries(image, section):
                        if section.name == _FAT and _is_wanted(kind, arch, image[begin : begin + size], kept):
                            stay += size
                        else:
                            image[begin : begin + size] = bytes(size)
                            gone += size
                elif _is_spare(section):
                    image[section.begin : section.begin + section.size] = bytes(section.size)
                    gone += section.size
        except (struct.error, ValueError) as error:
            raise HarnessError(
                f"{file.name} is not a library with CUDA code as this eagletwin knows it: {error}",
                consequence="the bundle was not packed",
                remedy="compare `cuobjdump -lelf` of it with tests/lab/bundle/archives.py",
            ) from error
    return stay, gone


def _sections(image: mmap.mmap) -> Iterator[_Section]:
    if image[:6] != _ELF:
        raise ValueError("no ELF file of 64 bits, little endian")
    [table] = struct.unpack_from("<Q", image, 0x28)
    size, count, of_names = struct.unpack_from("<HHH", image, 0x3A)
    rows = [struct.unpack_from("<IIQQQQ", image, table + number * size) for number in range(count)]
    names = rows[of_names][4]
    for name, kind, flags, _, begin, length in rows:
        text = image[names + name : image.find(b"\0", names + name)].decode()
        yield _Section(text, kind, bool(flags & _IS_LOADED), begin, length)


def _is_spare(section: _Section) -> bool:
    """Whether a loader never looks at it: names for a linker or a debugger."""
    if section.is_loaded:
        return False
    return section.kind == _SYMBOLS or section.name == ".strtab" or section.name.startswith(".debug")


def _entries(image: mmap.mmap, section: _Section) -> Iterator[tuple[int, int, int, int]]:
    """Kind, architecture, beginning and size of each entry of each container. Zeros may lie between two containers."""
    at, end = section.begin, section.begin + section.size
    while at + 16 <= end:
        magic, _, header, length = struct.unpack_from("<IHHQ", image, at)
        if magic != _MAGIC:
            if magic:
                raise ValueError(f"a container was to begin at {at:#x}")
            at += 4
            continue
        at, stop = at + header, at + header + length
        if stop > end:
            raise ValueError(f"the container that ends at {stop:#x} is longer than its section")
        while at < stop:
            kind, _, header, length = struct.unpack_from("<HHIQ", image, at)
            [arch] = struct.unpack_from("<I", image, at + 28)
            if header < _SMALLEST_ENTRY or at + header + length > stop:
                raise ValueError(f"an entry was to begin at {at:#x}")
            yield kind, arch, at + header, length
            at += header + length


def _is_wanted(kind: int, arch: int, code: bytes, kept: Kept) -> bool:
    if kind == _CUBIN and arch != kept.arch:
        return False
    if kind == _PTX and arch > kept.arch:
        return False
    return not kept.sources or re.fullmatch(kept.sources, _source(code)) is not None


def _source(code: bytes) -> str:
    """The .cu file that a kernel was compiled from, without its ending; nothing of code that is compressed."""
    found = re.search(rb"_INTERNAL_[0-9a-f]{8}_\d+_(\w+?)_cu_", code)
    return found[1].decode() if found else ""


# Archives of a bundle: tar, compressed by zstd. The same files give the same bytes, so a part that has arrived stays valid.
#
# A finished archive of wheels stays in the cache by what went into it: a run that broke off goes on with the next archive.
# It is zstd, and not xz: 2.5 GB are packed in minutes and not in an hour, for a fifth more bytes.

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
