"""Fetch a section of releases.lock into the cache, once: by pip, checked file by file, safe among processes.

A folder of the cache is whole or absent: it is made next to its place and renamed. Each time a folder is asked for, its files
are compared with the RECORD of their wheel (0.1 to 0.3 s), and a damaged folder is replaced. A symbolic link in the place of a
folder is the user's own: it is followed, neither checked nor replaced.
"""

import base64
import csv
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from eagletwin.harness.core.errors import HarnessError
from eagletwin.harness.core.files import alone, cache_folder
from eagletwin.harness.core.run_spec import Engine

# releases.lock, read: which releases of SGLang are known, and which files make each of them and the packages that it pins.

FILE = Path(__file__).with_name("releases.lock")


@dataclass(frozen=True, slots=True)
class Section:
    """A folder of the cache, `kind`/`name`, and what pip is to put in it.

    pins  requirement (`name==version`) -> sha256 of the files that may serve it, one for each platform
    """

    kind: str
    name: str
    pins: dict[str, tuple[str, ...]]


def parse(text: str) -> dict[str, Section]:
    """The sections of a lock file, by "kind/name", in order.

    text: requirements with their hashes in pip's format; each section begins with a line `# [kind/name]`
    """
    sections: dict[str, Section] = {}
    pins: dict[str, tuple[str, ...]] = {}
    for line in text.replace("\\\n", "").splitlines():
        if line.startswith("# ["):
            kind, _, name = line.strip("# []").partition("/")
            pins = {}
            sections[f"{kind}/{name}"] = Section(kind, name, pins)
        elif line and not line.startswith("#"):
            requirement, *hashes = line.split()
            pins[requirement] = tuple(word.removeprefix("--hash=sha256:") for word in hashes)
    return sections


@cache
def lock() -> dict[str, Section]:
    """The sections of releases.lock."""
    return parse(FILE.read_text(encoding="utf-8"))


def kind_of(engine: Engine) -> str:
    """The kind of the sections of an engine's releases."""
    return "releases" if engine == "sglang" else engine


def releases(engine: Engine = "sglang") -> tuple[str, ...]:
    """The known releases of an engine, oldest first."""
    return tuple(section.name for section in lock().values() if section.kind == kind_of(engine))


# Not unpacked, since no scheduler imports it: image and video models, and the extensions of the HTTP and gRPC servers, a third
# to a half of a wheel of SGLang; of vLLM all that is compiled for a GPU, nine tenths.
LEFT_OUT = re.compile(
    r"sglang/multimodal_gen/|sglang/srt/(grpc|server|multimodal|rust_extensions)/[^/]*\.so$"
    r"|vllm/.*\.(so|cu|cuh|h|hpp|js)$|vllm/vllm-rs$"
)


class NotFetched(HarnessError):
    """pip could not have the files, or what it had is not what was locked."""


def provide(section: Section) -> Path:
    """The folder of a section, fetched first unless it is there and whole. Raises NotFetched."""
    parent = cache_folder(section.kind)
    folder = parent / section.name
    if folder.is_symlink() and not folder.is_dir():
        raise NotFetched(
            f"{folder} is a link whose target is missing",
            consequence="nothing was run",
            remedy="remove it, or put its target back",
        )
    if folder.is_symlink() or is_whole(folder, section):
        return folder
    with alone(parent / f".{section.name}.lock"):
        if is_whole(folder, section):  # another process was faster
            return folder
        partial, old = parent / f".{section.name}.partial", parent / f".{section.name}.old"
        for leftover in (partial, old):  # of a process that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        again = "is damaged; fetching it again" if folder.exists() else "is not in the cache; fetching it"
        print(f"{section.name} {again}", file=sys.stderr, flush=True)
        try:
            tree = _fetch(section, partial)
            if folder.exists():
                folder.rename(old)
            tree.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)
    return folder


def is_there(section: Section) -> bool:
    """Whether the cache has the folder; a look, which reads none of its files."""
    return (cache_folder(section.kind) / section.name).is_dir()


def is_whole(folder: Path, section: Section) -> bool:
    """Whether a folder holds what the section names, each file as the RECORD of its wheel says, and nothing else."""
    return _matches_records(folder, [f"{pin.replace('==', '-')}.dist-info" for pin in section.pins], files_below(folder))


def record_of(release: str, engine: Engine = "sglang") -> Path | None:
    """The RECORD of a release's wheel, of the installed one or the cache: that of a copy may have been written anew."""
    name = f"{engine}-{release}.dist-info/RECORD"
    places = [cache_folder(kind_of(engine)) / release / name]
    with suppress(PackageNotFoundError):
        if (here := distribution(engine)).version == release:
            places.insert(0, Path(str(here.locate_file(name))))
    return next((place for place in places if place.is_file()), None)


def changed_since_release(
    folder: Path, wheel: str, record: Path | None = None, *, by_time: bool = False
) -> dict[str, str] | None:
    """The files of the engine's package, in a folder that may hold others, that are not as a wheel's RECORD says: by path, with
    the digest that RECORD names, "" if it does not name the file. None: its RECORD is missing or unreadable.

    wheel: name of its dist-info folder; record: another RECORD of it. by_time: read only files that were written after RECORD,
    which an installer writes last; the system keeps that time (ctime), and nobody can set it.
    """
    package = wheel.partition("-")[0]
    try:
        installed = (folder / wheel / "RECORD").stat().st_ctime_ns if by_time else 0
        rows = [*_rows(folder / wheel / "RECORD")]
        rows = [*_rows(record)] if record is not None else rows
        recorded = {name: digest for name, digest in rows if name.startswith(f"{package}/")}
    except (OSError, ValueError, csv.Error):
        return None
    files = {f"{package}/{name}" for name in files_below(folder / package)}
    gone = (name for name in recorded.keys() - files if not LEFT_OUT.match(name) and "__pycache__" not in name)
    changed = (name for name in files if name not in recorded or not _is(folder / name, recorded[name], installed))
    return {name: recorded.get(name, "") for name in sorted((*gone, *changed))}


def files_of_package(folder: Path, package: str = "sglang") -> set[str]:
    """The files of an engine's package in a folder, by their paths from there, without those that are not unpacked."""
    return {name for name in (f"{package}/{name}" for name in files_below(folder / package)) if not LEFT_OUT.match(name)}


def _is(file: Path, digest: str, installed: int) -> bool:
    """Whether a file has this digest; "": any will do. It has if it was written before `installed`, in ns."""
    try:
        return not digest or file.stat().st_ctime_ns <= installed or digest_of(file) == digest
    except OSError:  # a link to a folder, or to nothing
        return False


def _matches_records(folder: Path, wheels: Sequence[str], files: Set[str]) -> bool:
    """Whether `files` are all those that the RECORDs of these wheels name in a folder, byte for byte."""
    try:
        recorded = dict(row for wheel in wheels for row in _rows(folder / wheel / "RECORD"))
        return (
            files <= recorded.keys()
            and all(LEFT_OUT.match(name) for name in recorded.keys() - files)
            and all(digest_of(folder / name) == recorded[name] for name in files if recorded[name])
        )
    except (OSError, ValueError, csv.Error):
        return False


def files_below(folder: Path) -> set[str]:
    """All files below a folder, links followed, without Python's own bytecode. A link to a folder that it lies in is a file."""
    found = set()
    for where, folders, names in os.walk(folder, followlinks=True):
        endless = [name for name in folders if _leads_back(os.path.join(where, name))]
        folders[:] = [name for name in folders if name != "__pycache__" and name not in endless]
        base = os.path.relpath(where, folder)
        found |= {os.path.normpath(os.path.join(base, name)) for name in (*names, *endless)}
    return found


def _leads_back(folder: str) -> bool:
    """Whether a folder is a link to one that it lies in."""
    return os.path.islink(folder) and any(os.path.samefile(folder, around) for around in Path(folder).parents)


def _rows(record: Path) -> Iterator[tuple[str, str]]:
    """(path, sha256 as RECORD writes it, or "") of each file of a wheel."""
    with record.open(newline="", encoding="utf-8") as file:
        for path, digest, _ in csv.reader(file):
            yield path, digest.removeprefix("sha256=")


_known = dict[tuple[Path, str], tuple[tuple[int, ...], str]]()  # of files that this process reads again and again
_SETTLED = 1e9  # ns: what was written later may be written again in the same tick of the system's clock


def remembered(file: Path, what: str, digest: Callable[[bytes], str]) -> str:
    """A digest of a file, computed again only if the system says that the file changed (ctime). Raises OSError."""
    status, now = file.stat(), time.time_ns()
    state = (status.st_ino, status.st_dev, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    if (before := _known.get((file, what))) is not None and before[0] == state:
        return before[1]
    found = digest(file.read_bytes())
    if now - status.st_ctime_ns > _SETTLED:
        _known[file, what] = state, found
    return found


def digest_of(file: Path) -> str:
    """sha256 of a file, as RECORD writes it."""
    return remembered(
        file, "RECORD", lambda content: base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    )


def _fetch(section: Section, scratch: Path) -> Path:
    """Download and unpack below `scratch`; return the checked tree."""
    wheels, tree = scratch / "wheels", scratch / "tree"
    wheels.mkdir(parents=True)
    wanted = scratch / "requirements.txt"
    wanted.write_text(
        "".join(
            f"{pin} {' '.join(f'--hash=sha256:{digest}' for digest in digests)}\n" for pin, digests in section.pins.items()
        ),
        encoding="utf-8",
    )
    options = ["--no-deps", "--only-binary", ":all:", "--require-hashes", "--progress-bar", "off"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(wheels), "--requirement", str(wanted)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise _fetch_error(section, _gist(done.stderr or done.stdout))
    try:
        for wheel in wheels.iterdir():
            with zipfile.ZipFile(wheel) as packed:
                packed.extractall(tree, [name for name in packed.namelist() if not LEFT_OUT.match(name)])
    except (zipfile.BadZipFile, OSError) as error:
        raise _fetch_error(section, f"a wheel could not be unpacked: {error}") from error
    if not is_whole(tree, section):
        raise _fetch_error(section, "the unpacked files are not those that the wheel's RECORD names")
    return tree


def _gist(output: str) -> str:
    """What pip has to say for itself: its last errors, on one line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR") or "DO NOT MATCH" in line]
    return (" ".join(errors[-2:]) or " ".join(lines[-1:]) or "pip said nothing")[:400]


def _fetch_error(section: Section, why: str) -> NotFetched:
    others = (path.name for path in cache_folder(section.kind).iterdir() if not path.name.startswith("."))
    here = sorted(name for name in others if name != section.name)
    return NotFetched(
        f"{section.name} could not be fetched: {why}",
        consequence=f"nothing was run; {section.kind} in the cache: {', '.join(here) or 'none'}",
        remedy="use one of those, or look at the network, at `pip config list` (which index?) and at the free disk space",
    )
