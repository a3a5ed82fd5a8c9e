"""A unified diff as an SGLang: a tree of hard links to a release, in the cache, with the diff applied. Evidence of it is
that of a tree: code outside of functions and Triton kernels count."""

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.files import cache_folder

from .source import Source

_PATH = re.compile(r"^(?:---|\+\+\+) ([^\t\n]+)", re.MULTILINE)


def is_diff(file: Path) -> bool:
    """Whether a patch file is a unified diff, and not JSON."""
    try:
        return not file.read_bytes().lstrip().startswith(b"{")
    except OSError:
        return False  # whoever reads it as JSON says why it cannot be read


def patched_tree(source: Source, file: Path) -> Path:
    """The folder of the release with the diff applied; made once for each content. Paths in the diff may begin anywhere above
    sglang/; what lies outside of it is left out. Raises InputError."""
    text = file.read_bytes()
    wheels = [*source.root.glob("sglang-*.dist-info")]
    if source.difference is not None or len(wheels) != 1:
        raise _refused(f"{file} is a diff, and {source.name or 'SGLang'} is not a release", "apply it to that tree: git apply")
    depth = _depth(file, text.decode(errors="replace"))
    digest = hashlib.sha256(f"{wheels[0].name}\0{depth}\0".encode() + text).hexdigest()[:16]
    place = cache_folder("patched") / f"{file.stem}-{digest}"
    if place.is_dir():
        return place
    with tempfile.TemporaryDirectory(dir=place.parent) as scratch:
        root = Path(scratch, "tree")
        link_tree((source.root / "sglang", wheels[0]), root)
        _apply(file, text, depth, root)
        try:
            root.rename(place)
        except OSError:  # another process has just made it
            if not place.is_dir():
                raise
    return place


def _depth(file: Path, text: str) -> int:
    """How many folders stand before sglang/ in the diff's paths."""
    for path in _PATH.findall(text):
        parts: list[str] = path.strip('"').split("/")
        if "sglang" in parts[:-1]:
            return len(parts) - 1 - parts[::-1].index("sglang")
    raise _refused(f"{file} is neither JSON nor a unified diff of files below sglang/", "docs/reference/patch.md shows both")


def _apply(file: Path, text: bytes, depth: int, root: Path) -> None:
    environment = {**os.environ, "GIT_DIR": str(root / "no-repository"), "GIT_CEILING_DIRECTORIES": str(root.parent)}
    words = ["git", "apply", f"-p{depth}", "--include=sglang/*", "--whitespace=nowarn", "-"]
    try:
        done = subprocess.run(words, cwd=root, input=text, env=environment, capture_output=True, check=False)
    except OSError as error:
        raise _refused(f"git cannot be started: {error}", "install git, which applies diffs") from error
    if done.returncode:
        said = os.fsdecode(done.stderr).strip().splitlines()
        raise _refused(f"{file} does not apply: {said[0] if said else 'git does not say why'}", "make it from that release")


def link_tree(folders: Iterable[Path], root: Path, *left_out: str) -> None:
    """A copy of these folders in `root`, of hard links where that is possible, without bytecode and what has these names."""
    ignore = shutil.ignore_patterns("__pycache__", *left_out)
    for folder in folders:
        shutil.copytree(folder, root / folder.name, copy_function=_link, ignore=ignore, symlinks=True)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # on another device
        shutil.copy2(source, target)


def _refused(cause: str, remedy: str) -> InputError:
    return InputError(cause, consequence="nothing was run", remedy=remedy)
