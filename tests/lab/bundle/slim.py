"""Empty what one GPU does not need of a library with CUDA code: machine code of other GPUs, symbols, debug information.

Bytes become zeros in place, so every offset of the file stays valid, and what is empty compresses to nothing. The format of
fat binaries is in no public header: a container begins with a magic number, and holds one entry for each architecture. What
does not look so is an error, since a library that was emptied wrongly would fail on the GPU only.
"""

import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from eagletwin.harness.core.errors import HarnessError

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
                remedy="compare `cuobjdump -lelf` of it with tests/lab/bundle/slim.py",
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
