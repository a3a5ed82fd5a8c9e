"""What a GPU host runs: check the parts of a bundle, unpack them, and say what Python's environment must be.

It travels with the parts and runs alone, so it imports the standard library only. `setup.sh` of a bundle calls it.

    python3 unpack.py check FOLDER        say which parts are missing or damaged
    python3 unpack.py take FROM FOLDER    copy the parts of FROM that are whole, and check FOLDER: parts may arrive one by one
    python3 unpack.py unpack FOLDER SITE  unpack into SITE, where that is not done, and write SITE/environment.sh
"""

import hashlib
import importlib.util
import io
import json
import multiprocessing
import os
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

MANIFEST, ENVIRONMENT = "manifest.json", "environment.sh"


def check(folder: Path) -> list[str]:
    """Which files of the bundle are missing or damaged."""
    found = []
    for name, of in _manifest(folder)["files"].items():
        file = folder / name
        if not file.is_file():
            found.append(f"{name} is missing")
        elif file.stat().st_size != of["size"]:
            found.append(f"{name} is damaged: it has {file.stat().st_size:,} bytes, and should have {of['size']:,}")
        elif hashlib.sha256(file.read_bytes()).hexdigest() != of["sha256"]:
            found.append(f"{name} is damaged: its sha256 is not the manifest's")
    return found


def take(source: Path, folder: Path) -> list[str]:
    """Copy what is there of a bundle, and return what the folder still lacks. Parts of another bundle are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    manifest = (source / MANIFEST).read_bytes()
    if not (folder / MANIFEST).is_file() or (folder / MANIFEST).read_bytes() != manifest:
        (folder / MANIFEST).write_bytes(manifest)
        for problem in check(folder):
            (folder / problem.partition(" ")[0]).unlink(missing_ok=True)
    for name in _manifest(source)["files"]:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    return check(folder)


def unpack(folder: Path, site: Path) -> None:
    """Unpack a bundle that is whole. Its manifest is written last: without it, or with another, all begins anew."""
    manifest = _manifest(folder)
    if (site / MANIFEST).is_file() and (site / MANIFEST).read_bytes() == (folder / MANIFEST).read_bytes():
        return
    for name in {archive["folder"] for archive in manifest["archives"]}:
        shutil.rmtree(site / name, ignore_errors=True)
    (site / MANIFEST).unlink(missing_ok=True)
    site.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / manifest["decoder"]) as decoder:
        decoder.extractall(site / "decoder")
    fork = multiprocessing.get_context("fork")
    with fork.Pool(min(len(manifest["archives"]), os.cpu_count() or 1)) as pool:
        pool.starmap(_unpack, [(folder, site, archive, manifest["parts"]) for archive in manifest["archives"]])
    shutil.copyfile(folder / MANIFEST, site / MANIFEST)


def _unpack(folder: Path, site: Path, archive: dict[str, Any], parts: list[str]) -> None:
    sys.path.insert(0, str(site / "decoder"))
    from backports import zstd  # type: ignore[import-untyped, import-not-found, unused-ignore]  # of the bundle

    data, begin, end = bytearray(), archive["begin"], archive["begin"] + archive["size"]
    at = 0
    for name in parts:
        size = (folder / name).stat().st_size
        if at < end and at + size > begin:
            with (folder / name).open("rb") as part:
                part.seek(max(0, begin - at))
                data += part.read(min(size, end - at) - max(0, begin - at))
        at += size
    options = {zstd.DecompressionParameter.window_log_max: archive["window"]}
    (site / archive["folder"]).mkdir(exist_ok=True)
    with zstd.ZstdFile(io.BytesIO(data), options=options) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
        tar.extractall(site / archive["folder"], filter=_from_now)


def _from_now(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo:
    """A file as tarfile's own filter for data lets it be, and new: one of the year 1970 is absent to some versions of ninja."""
    return tarfile.data_filter(member, folder).replace(mtime=None, deep=False)  # type: ignore[arg-type]  # None: the present


def environment(site: Path) -> str:
    """The shell text that lets Python find the packed packages, and compilers what they need. Links the image's libraries."""
    manifest, packages = _manifest(site), site / "site"
    command = site / "bin" / "eagletwin"
    command.parent.mkdir(exist_ok=True)
    command.write_text('#!/bin/sh\nexec python3 -m eagletwin "$@"\n')
    command.chmod(0o755)
    paths = [site / "eagletwin" / "src", packages, *(packages / path for path in manifest["paths"])]
    text = [
        f"export PYTHONPATH={':'.join(map(str, paths))}",
        f"export EAGLETWIN_WEIGHTS={site / 'weights'}",
        f'export EAGLETWIN_CACHE="${{EAGLETWIN_CACHE:-{site / "cache"}}}"',
        f"export PATH={site / 'bin'}:$PATH",
        "export HF_HUB_OFFLINE=1",
    ]
    for name in manifest["libraries"]:  # the packed torch looks for CUDA in ../../nvidia/*/lib
        link, there = packages / "nvidia" / name, _of_the_image(f"nvidia/{name}", site)
        if there is not None and not link.exists():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(there)
    if manifest["compiles"]:
        home, headers = cuda_home(), _of_the_image("nvidia/cu13/include", site)
        if home is not None:
            text.append(f"export CUDA_HOME={home}")
            if not (home / "include" / "curand.h").is_file() and headers is not None:
                text.append(f"export CPATH={headers}")
    return "\n".join(text) + "\n"


def cuda_home() -> Path | None:
    """The CUDA toolkit: $CUDA_HOME, where the nvcc of the path lies, or the usual place, as that nvcc may be a script."""
    named, nvcc = os.environ.get("CUDA_HOME"), shutil.which("nvcc")
    if named:
        return Path(named)
    places = [Path(nvcc).resolve().parents[1]] if nvcc else []
    return next(
        (place for place in (*places, Path("/usr/local/cuda")) if (place / "include" / "cuda_runtime.h").exists()), None
    )


def lacks(site: Path) -> list[str]:
    """What the manifest takes from the image, and the image has not."""
    manifest = _manifest(site)
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    found = [f"Python {manifest['python']}: here it is {here}"] if here != manifest["python"] else []
    found += [name for name in manifest["image"] if importlib.util.find_spec(name) is None]
    found += [f"nvidia/{name}" for name in manifest["libraries"] if _of_the_image(f"nvidia/{name}", site) is None]
    if manifest["compiles"]:
        home = cuda_home()
        if home is None:
            found.append("nvcc: name the CUDA toolkit by $CUDA_HOME")
        elif not (home / "lib64" / "libcudart.so").exists():
            found.append(f"{home}/lib64/libcudart.so")
        found += [name for name in ("g++", "ninja") if shutil.which(name) is None]
    return found


def _of_the_image(path: str, site: Path) -> Path | None:
    """A folder of the packages that Python has without the bundle."""
    places = (Path(entry) for entry in sys.path if entry and not Path(entry).is_relative_to(site))
    return next((place / path for place in places if (place / path).is_dir()), None)


def _manifest(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    return read


def main(arguments: list[str]) -> int:
    match arguments:
        case ["check", folder]:
            problems = check(Path(folder))
        case ["take", source, folder]:
            problems = take(Path(source), Path(folder))
        case ["unpack", folder, site]:
            problems = check(Path(folder))
            if not problems:
                there = Path(site).absolute()
                unpack(Path(folder), there)
                (there / ENVIRONMENT).write_text(environment(there), encoding="utf-8")
                for name in lacks(there):
                    print(f"eagletwin: not packed, and missing in this image: {name}", file=sys.stderr)
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    count = len(_manifest(Path(arguments[-1] if arguments[0] == "take" else arguments[1]))["files"])
    print(f"eagletwin: {count - len(problems)} of {count} files of the bundle are here and whole")
    for problem in problems:
        print(f"eagletwin: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
