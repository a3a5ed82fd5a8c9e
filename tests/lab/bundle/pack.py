"""Pack eagletwin, a release of SGLang, and what both need on a GPU host without network. `. FOLDER/setup.sh` unpacks it.

Wheels come from the package index through pip, once, and stay in the cache; so do the archives that are made of them.
Nothing of others is kept in the repository.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagletwin.harness.core.errors import HarnessError, InputError
from eagletwin.harness.core.files import alone, cache_folder
from eagletwin.harness.families.weights import keep

from . import archives, unpack
from .archives import digest, requirements, wheel
from .contents import ARCH, PYTHON, Contents, contents_of
from .unpack import cuda_home

# Compile FlashInfer's `sampling` before the GPU host needs it: nvcc takes over a minute for it there, and no GPU here.
#
# FlashInfer takes a library that lies in `flashinfer/data/aot` as it is. Where no nvcc is here, the host compiles it when a
# request first samples.

LIBRARY = "flashinfer/data/aot/sampling/sampling.so"
_SOURCES = ("sampling", "renorm", "flashinfer_sampling_binding")
_FOLDERS = (
    *(f"flashinfer/data/{part}/" for part in ("include", "csrc", "cccl", "cutlass", "spdlog")),
    *("tvm_ffi/", "nvidia/cu13/include/"),
)
_INCLUDED = (
    *(f"flashinfer/data/{part}" for part in ("cccl/cub", "cccl/libcudacxx/include", "cccl/thrust", "include", "csrc")),
    *(f"flashinfer/data/{part}/include" for part in ("cutlass", "cutlass/tools/util", "spdlog")),
    *("tvm_ffi/include", "tvm_ffi/3rdparty/dlpack/include", "nvidia/cu13/include"),
)
# Those of flashinfer/jit/core.py and cpp_ext.py for this module, with torch's C++ interface and Python's stable one.
_FLAGS = (
    *("-std=c++17", "-use_fast_math", "-Xfatbin=-compress-all", "--compress-mode=size", "-DNDEBUG", "-O3"),
    *(f"-DFLASHINFER_ENABLE_{kind}" for kind in ("F16", "BF16", "FP8_E4M3", "FP8_E5M2", "FP8_E8M0", "FP4_E2M1")),
    *("-DPy_LIMITED_API=0x03090000", "-D_GLIBCXX_USE_CXX11_ABI=1", "--compiler-options=-fPIC", "--expt-relaxed-constexpr"),
    *("-static-global-template-stub=false", f"-gencode=arch=compute_{ARCH}a,code=sm_{ARCH}a"),
)


def compiled_ahead(wheels: dict[str, Path], kept: Path) -> Path | None:
    """The library, compiled once and kept; None where there is no nvcc. wheels: of FlashInfer, tvm-ffi and curand, by name."""
    home = cuda_home()
    if home is None:
        return None
    nvcc = home / "bin" / "nvcc"
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    made_of = [digest(wheel) for wheel in wheels.values()], version, _FLAGS
    library = kept / f"sampling-{hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:16]}.so"
    if not library.is_file():
        with tempfile.TemporaryDirectory(prefix="eagletwin-") as scratch:
            for wheel in wheels.values():
                with zipfile.ZipFile(wheel) as archive:
                    archive.extractall(scratch, [name for name in archive.namelist() if name.startswith(_FOLDERS)])
            _compile(nvcc, home, Path(scratch)).replace(library)
    return library


def _compile(nvcc: Path, home: Path, folder: Path) -> Path:
    included = [f"-I{folder / path}" for path in _INCLUDED] + [f"-I{home / 'include'}", f"-I{sysconfig.get_path('include')}"]

    def compile_one(name: str) -> None:
        source = folder / "flashinfer" / "data" / "csrc" / f"{name}.cu"
        _run([nvcc, *_FLAGS, *included, "-c", source, "-o", folder / f"{name}.o"])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, _SOURCES))
    library = folder / "sampling.so"
    objects = [folder / f"{name}.o" for name in _SOURCES]
    _run(["g++", "-shared", *objects, f"-L{home / 'lib64'}", "-lcudart", "-o", library])
    return library


def _run(command: list[str | Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(done.stderr[-4000:], file=sys.stderr)
        raise HarnessError(
            f"{Path(command[0]).name} cannot compile FlashInfer's sampling, and says why above",
            consequence="the bundle was not packed",
            remedy="take nvcc off the path and unset $CUDA_HOME: the GPU host then compiles it when a request first samples",
        )


SETUP = "setup.sh"
PART = 50_000_000  # bytes: what a host takes at once may be limited to 64 MiB, and a checkout of 10 MB may travel with it
_LARGE = 30_000_000  # wheels from this size on have an archive of their own, as archives are unpacked side by side

_SETUP_TEXT = f"""\
# Source this on the GPU host: `. BUNDLE/setup.sh`. It unpacks the bundle, where that is not done, and sets what Python needs.
EAGLETWIN_BUNDLE=$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)
EAGLETWIN_SITE=${{EAGLETWIN_SITE:-/tmp/eagletwin-gpu}}
python3 "$EAGLETWIN_BUNDLE/unpack.py" unpack "$EAGLETWIN_BUNDLE" "$EAGLETWIN_SITE" || return 1
. "$EAGLETWIN_SITE/{unpack.ENVIRONMENT}"
"""


@dataclass(frozen=True, slots=True)
class Archive:
    """A file to be cut into parts. folder: where on the host its content goes."""

    folder: str
    file: Path


def bundle(folder: Path, checkout: Path, release: str, say: Callable[[str], None] = print) -> list[Path]:
    """Write the bundle into `folder`, and return its files. checkout: the root of eagletwin's source tree."""
    contents = contents_of(release)
    lock = checkout / "requirements" / contents.lock
    if not lock.is_file():
        raise InputError(f"{lock} is not there", consequence="nothing was packed", remedy="run it in a checkout of eagletwin")
    folder.mkdir(parents=True, exist_ok=True)
    kept, pins = cache_folder("bundles"), requirements(lock)
    with alone(kept / "lock"), tempfile.TemporaryDirectory(prefix="eagletwin-") as scratch:
        zstd = archives.use(archives.codec(pins, f"{sys.version_info[0]}.{sys.version_info[1]}"), kept)
        decoder = archives.codec(pins, PYTHON)
        wheels = {
            name: wheel(pin, pins[pin], contents.pythons.get(name, PYTHON)) for pin in pins if (name := pin.partition("==")[0])
        }
        packed = [Archive("site", file) for file in _of_wheels(contents, wheels, kept, zstd, say)]
        library = _ahead(contents, wheels, kept, say)
        if library is not None:
            packed.append(Archive("site", Path(scratch) / "ahead"))
            archives.pack(zstd, packed[-1].file, [(LIBRARY, library)])
        packed += _of_us(checkout, Path(scratch), zstd)
        about = {
            "release": release,
            "packages": dict(pin.split("==") for pin in pins if pin.partition("==")[0] not in contents.stays),
            "compiled": [LIBRARY] if library is not None else [],
            **needs(contents),
        }
        return seal(folder, about, packed, decoder)


def needs(contents: Contents) -> dict[str, Any]:
    """What the manifest says of the host: what it must bring, and where Python is to look for what was packed."""
    return {
        "python": PYTHON,
        "gpu": f"sm_{ARCH}",
        "image": contents.image,
        "libraries": contents.libraries,
        "paths": contents.paths,
        "compiles": contents.compiles,
    }


def seal(folder: Path, about: dict[str, Any], packed: list[Archive], decoder: Path, part: int = PART) -> list[Path]:
    """Cut the archives into parts, and write what checks and unpacks them. Returns the files of the bundle."""
    begin, listed = 0, []
    for archive in packed:
        size = archive.file.stat().st_size
        listed.append({"folder": archive.folder, "begin": begin, "size": size, "window": archives.WINDOW})
        begin += size
    parts = _cut([archive.file for archive in packed], folder, part)
    shutil.copyfile(decoder, folder / decoder.name)
    shutil.copyfile(unpack.__file__, folder / "unpack.py")
    (folder / SETUP).write_text(_SETUP_TEXT, encoding="utf-8")
    files = [*parts, folder / decoder.name, folder / "unpack.py", folder / SETUP]
    manifest = {
        **about,
        "decoder": decoder.name,
        "archives": listed,
        "parts": [file.name for file in parts],
        "files": {file.name: {"size": file.stat().st_size, "sha256": digest(file)} for file in files},
    }
    (folder / unpack.MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    return [*files, folder / unpack.MANIFEST]


def _cut(files: list[Path], folder: Path, size: int) -> list[Path]:
    """The files, one after the other, as parts of this size. Parts of an older bundle go."""
    for old in folder.glob("part-*"):
        old.unlink()
    parts: list[Path] = []
    room, out = 0, None
    for file in files:
        with file.open("rb") as opened:
            while block := opened.read(min(1 << 20, room) or 1):
                if out is None or room == 0:
                    if out is not None:
                        out.close()
                    parts.append(folder / f"part-{len(parts) + 1:02}")
                    out, room = parts[-1].open("wb"), size
                out.write(block)
                room -= len(block)
    if out is not None:
        out.close()
    return parts


def _of_wheels(
    contents: Contents, wheels: dict[str, Path], kept: Path, zstd: Any, say: Callable[[str], None]
) -> Iterable[Path]:
    """Archives of the wheels that travel: of each large one, and of all others together."""
    travel = [file for name, file in wheels.items() if name not in contents.stays]
    large = [file for file in travel if file.stat().st_size >= _LARGE]
    for group in [*([file] for file in large), [file for file in travel if file not in large]]:
        # all that decides what the archive holds
        made_of = [digest(file) for file in group], contents.without, contents.sources, ARCH, archives.LEVEL, archives.WINDOW
        code = digest(Path(archives.__file__ or ""))
        archive = kept / f"{hashlib.sha256(json.dumps([made_of, code]).encode()).hexdigest()[:24]}.tar.zst"
        if not archive.is_file():
            with tempfile.TemporaryDirectory(prefix="eagletwin-") as scratch:
                for file in group:
                    unzip(file, Path(scratch), contents)
                archives.pack(zstd, archive, _files(Path(scratch)))
        name = group[0].name.partition("-")[0] if len(group) == 1 else f"{len(group)} others"
        say(f"{archive.stat().st_size / 1e6:8.1f} MB  {name}")
        yield archive


def unzip(file: Path, site: Path, contents: Contents) -> None:
    """Unpack what travels of a wheel, its libraries slimmed. SGLang's own stay as they were: the host knows the release by its
    content."""
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            if member.is_dir() or not contents.holds(member.filename):
                continue
            path = Path(archive.extract(member, site))
            path.chmod((member.external_attr >> 16) & 0o777 or 0o644)
            if archives.is_library(path) and not member.filename.startswith("sglang/"):
                archives.slim(path, archives.Kept(arch=ARCH, sources=contents.sources_of(member.filename)))


def _ahead(contents: Contents, wheels: dict[str, Path], kept: Path, say: Callable[[str], None]) -> Path | None:
    if not contents.stays:
        return None
    library = compiled_ahead({name: wheels[name] for name in ("flashinfer-python", "apache-tvm-ffi", *contents.stays)}, kept)
    if library is None:
        say("no nvcc is here: FlashInfer's sampling is compiled on the host, when a request first samples")
    return library


def _of_us(checkout: Path, scratch: Path, zstd: Any) -> list[Archive]:
    """Archives of eagletwin, and of its recipes' weights: another torch would round their random numbers otherwise."""
    keep(scratch / "weights")
    found = [Archive(name, scratch / f"{name}.tar.zst") for name in ("eagletwin", "weights")]
    archives.pack(zstd, found[0].file, _of_the_checkout(checkout))
    archives.pack(zstd, found[1].file, _files(scratch / "weights"))
    return found


def _of_the_checkout(checkout: Path) -> Iterable[tuple[str, Path]]:
    command = ["git", "-C", str(checkout), "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [(name, checkout / name) for name in listed if os.path.lexists(checkout / name)]


def _files(folder: Path) -> list[tuple[str, Path]]:
    return [(str(path.relative_to(folder)), path) for path in folder.rglob("*") if path.is_file() or path.is_symlink()]
