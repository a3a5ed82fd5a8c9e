"""In what a source tree differs from its wheel's RECORD or from git's HEAD: by content, which names it, as a patch, and by the
functions that changed. Reads only the files that differ.
"""

import contextlib
import difflib
import hashlib
import importlib.metadata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from eagletwin.harness.core.differs import ChangedFunction, Watch, changes_of
from eagletwin.harness.core.files import cache_folder
from eagletwin.harness.core.run_spec import TITLES

from .changed_code import Changed, compare_sources
from .provision import digest_of

PATCH = "sglang.patch"  # in a run folder
MAX_FILE, MAX_PATCH = 1 << 20, 4 << 20  # bytes: of a file whose lines are compared, and of the whole patch
DOCUMENTS = (".md", ".rst", ".txt")


@dataclass(frozen=True, slots=True)
class File:
    """A file that differs, by its path from the folder that holds the package. None: it is not there; old_known: whether `old`
    is what was there, or the original is not at hand."""

    path: str
    old: bytes | None
    new: bytes | None
    old_known: bool = True

    @property
    def module(self) -> str:
        return ".".join(Path(self.path).with_suffix("").parts).removesuffix(".__init__")


@dataclass(frozen=True, slots=True)
class Difference:
    """digest: of what differs; patch: a unified diff that makes the tree of its base, with what it cannot hold named."""

    base: str
    digest: str
    patch: str
    watch: Watch


def since_release(root: Path, version: str, changes: Mapping[str, str]) -> Difference | None:
    """From a wheel; None: the tree is as released. changes: what provision.changed_since_release says of it."""
    files = []
    for path, digest in changes.items():
        old = _original(path, digest, version) if digest else None
        files.append(File(path, old, content_of(root / path), old_known=not digest or old is not None))
    return difference(version, files) if files else None


def since_commit(root: Path, commit: str, paths: Iterable[str], originals: Sequence[bytes | None]) -> Difference | None:
    """From git's HEAD: these files of the work tree, and what HEAD has in their places. None: no file differs."""
    pairs = zip(paths, originals, strict=True)
    files = [File(path, old, new) for path, old in pairs if (new := content_of(root / path)) != old]
    return difference(commit, files) if files else None


def difference(base: str, files: Sequence[File]) -> Difference:
    """The difference that consists of these files, sorted by their paths."""
    files = sorted(files, key=lambda file: file.path)
    digest = hashlib.sha256()
    for file in files:
        content = b"gone" if file.new is None else hashlib.sha256(file.new).digest()
        digest.update(file.path.encode() + b"\0" + content)
    return Difference(base, digest.hexdigest()[:8], _patch(base, files), watch_of(base, files))


def keep(difference: Difference | None, folder: Path) -> None:
    """Write the difference into a run folder, if there is one."""
    if difference is not None:
        (folder / PATCH).write_bytes(difference.patch.encode())


def content_of(file: Path) -> bytes | None:
    """A file's contents; for a link to a folder, the names and contents of the files there. None: the file is missing."""
    try:
        if file.is_dir():
            inside = sorted(one for one in file.rglob("*") if one.is_file() and "__pycache__" not in one.parts)
            return b"".join(str(one.relative_to(file)).encode() + b"\0" + one.read_bytes() for one in inside)
        return file.read_bytes()
    except OSError:
        return None


def _original(path: str, digest: str, version: str) -> bytes | None:
    """A file of a release as its RECORD says, from the installed SGLang or from the cache; None: neither has it."""
    package = path.partition("/")[0]
    places = [cache_folder("releases" if package == "sglang" else package) / version / path]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        places.insert(0, Path(str(importlib.metadata.distribution(package).locate_file(path))))
    for place in places:
        try:
            if digest_of(place) == digest:
                return place.read_bytes()
        except OSError:
            continue
    return None


def watch_of(base: str, files: Sequence[File]) -> Watch:
    """The changes that engine processes look for, and what a trace says of them."""
    modules, removed, unlisted, outside, others = dict[str, tuple[ChangedFunction, ...]](), [], [], [], []
    for file in files:
        if not file.path.endswith(".py"):
            if file.new is not None and not file.path.endswith(DOCUMENTS):
                others.append(file.path)
            continue
        if file.new is None:
            removed.append(file.module)
            continue
        if not file.old_known:
            unlisted.append(file.path)
        found = _compare_file(file)
        modules[file.module] = tuple(place.of_file(file.path) for place in found.places)
        removed += found.removed
        outside += [file.module] * (found.outside or bool(found.removed))
    differs = replace(
        changes_of(base, (place for places in modules.values() for place in places)),
        modules=tuple(outside),
        removed=tuple(removed),
        files=tuple(others),
        unlisted=tuple(unlisted),
    )
    return Watch(differs, modules)


def _compare_file(file: File) -> Changed:
    assert file.new is not None
    try:
        return compare_sources(b"" if file.old is None and file.old_known else file.old, file.new, file.module)
    except (SyntaxError, ValueError, RecursionError):  # the import says so, if it is imported
        return Changed((), (), outside=True)


def _patch(base: str, files: Sequence[File]) -> str:
    package = files[0].path.partition("/")[0] if files else "sglang"
    title = TITLES.get(package, package)
    parts = [f"Makes the tree that was run of {title} {base}: `patch -p1` in the folder that holds its {package}/.\n"]
    size = 0
    for file in files:
        text = _lines_of(file)
        size += len(text)
        parts.append(
            text
            if size <= MAX_PATCH
            else _describe_missing(file, f"left out, since the patch is longer than {MAX_PATCH} bytes")
        )
    return "".join(parts)


def _lines_of(file: File) -> str:
    """The unified diff of one file, or a line that names it."""
    if not file.old_known:
        return _describe_missing(file, "its original is not at hand (`eagletwin info releases fetch` brings known releases)")
    if max(len(file.old or b""), len(file.new or b"")) > MAX_FILE:
        return _describe_missing(file, f"longer than {MAX_FILE} bytes")
    try:
        old, new = ((content or b"").decode() for content in (file.old, file.new))
    except UnicodeDecodeError:
        return _describe_missing(file, "binary")
    if "\0" in old + new:
        return _describe_missing(file, "binary")
    names = "/dev/null" if file.old is None else f"a/{file.path}", "/dev/null" if file.new is None else f"b/{file.path}"
    lines = difflib.unified_diff(_split(old), _split(new), *names)
    text = "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
    return text or _describe_missing(file, "empty")


def _split(text: str) -> list[str]:
    """Lines as patch sees them: they end with a line feed, and with nothing else."""
    lines = text.split("\n")
    return [f"{line}\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def _describe_missing(file: File, why: str) -> str:
    state = "gone" if file.new is None else f"sha256 {hashlib.sha256(file.new).hexdigest()}"
    return f"Not here: {file.path} ({why}); {state}\n"
