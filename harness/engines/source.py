"""Which SGLang an engine runs: the installed one, a published release, or a source tree as it is; and what to call it."""

import hashlib
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from eagletwin.harness.errors import InputError
from eagletwin.harness.versions import installed

from .lock import lock, releases
from .provision import is_as_released, is_there, provide


@dataclass(frozen=True, slots=True)
class Source:
    """An SGLang. `paths` come before everything else on the engine processes' sys.path; empty: what is installed here.

    name     what the user called it: "" of the installed one, a release, or a folder
    version  what traces call it: the release, or the commit of a tree; "" of the installed one, which knows its own
    """

    name: str = ""
    paths: tuple[Path, ...] = ()
    version: str = ""

    @property
    def called(self) -> str:
        """What to call it where nothing was imported yet."""
        return self.version or installed("sglang")

    @property
    def tree(self) -> str:
        """The folder that was named; "" if none was."""
        return self.name if self.name != self.version else ""


INSTALLED = Source()


def resolve(name: str) -> Source:
    """The SGLang of this name, fetched if need be. Raises InputError if there is none, NotFetched if it cannot be had."""
    if name in ("", installed("sglang")):
        return INSTALLED
    section = lock().get(f"releases/{name}")
    if section is not None:
        folder = provide(section)
        return Source(name, (folder, *_layers(folder)), name)
    if Path(name).is_dir():
        return _tree(Path(name).absolute())
    raise InputError(
        f"{name!r} is neither a release nor a folder",
        consequence="nothing was run",
        remedy=f"use a source tree or one of {', '.join(releases())}",
    )


def here() -> tuple[str, ...]:
    """The known releases that need no network, oldest first."""
    mine = installed("sglang")
    return tuple(name for name in releases() if name == mine or is_there(lock()[f"releases/{name}"]))


def _tree(folder: Path) -> Source:
    for root in (folder, folder / "python"):
        if (root / "sglang" / "__init__.py").is_file():
            return Source(str(folder), (root, *_layers(root)), _version(root))
    raise InputError(
        f"{folder} holds no sglang", consequence="nothing was run", remedy="name the root of a checkout, or what holds sglang/"
    )


def _version(root: Path) -> str:
    """The commit, with -dirty if the tree is not as it was committed; else the wheel's version; else a digest of the files."""
    commit = _git(root, "rev-parse", "--short=10", "HEAD")
    if commit and _git(root, "ls-files", "sglang/__init__.py"):  # else the repository around it is another
        return commit + ("-dirty" if _git(root, "status", "--porcelain", "--", "sglang") else "")
    for metadata in root.glob("sglang-*.dist-info/METADATA"):
        found = re.search(r"^Version: (\S+)", metadata.read_text(encoding="utf-8"), re.MULTILINE)
        if found:
            return found[1] + ("" if is_as_released(root, metadata.parent.name) else "-dirty")
    digest = hashlib.sha256()
    for file in sorted((root / "sglang").rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return f"tree-{digest.hexdigest()[:10]}"


def _git(root: Path, *words: str) -> str:
    """What git says of a folder; "" if nothing: no repository, or no git."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}  # a hook's, a bisection's
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _layers(root: Path) -> tuple[Path, ...]:
    """Packages that this SGLang pins and this environment has in another version: transformers, and what goes with it."""
    files = [file for file in (*root.glob("sglang-*.dist-info/METADATA"), root / "pyproject.toml") if file.is_file()]
    if not files:
        print(
            f"note: {root} names no pin of transformers (no pyproject.toml, no sglang-*.dist-info); it runs with "
            f"{installed('transformers')}, as its traces say. A copy of a release needs its dist-info beside it",
            file=sys.stderr,
        )
    for file in files:
        pin = re.search(r"(?<![\w-])transformers==([\w.]+)", file.read_text(encoding="utf-8"))
        if pin is None or pin[1] == installed("transformers"):
            continue
        section = lock().get(f"layers/transformers-{pin[1]}")
        if section is not None:
            return (provide(section),)
        print(
            f"note: {root} pins transformers {pin[1]}, which is not in eagletwin's lock file; "
            f"it runs with {installed('transformers')}, as its traces say",
            file=sys.stderr,
        )
    return ()
