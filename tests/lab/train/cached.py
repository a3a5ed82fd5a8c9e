"""Where a pair lies: in the cache, made once, or in a folder that somebody names.

A pair is written to a temporary folder, which is renamed when it is whole. Processes that ask the cache for the same pair at
once wait for the first of them.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.files import alone, cache_folder
from eagletwin.harness.deserved.draft import check_device

from .pair import FACTS, PARTS, PROMPTS, make_pair
from .settings import PairSettings
from .text import standard_library


def cached_pair(settings: PairSettings, device: str, say: Callable[[str], None]) -> Path:
    """The folder of a pair in the cache, trained first unless it is there and whole.

    device: `cpu` or `cuda`, where it is trained; a pair that is there may come from the other.
    Raises InputError for a GPU that is missing, HarnessError if transformers is.
    """
    corpus = standard_library()
    parent = cache_folder("trained")
    folder = parent / f"{settings.name}-{settings.digest(corpus.digest)[:16]}"
    if is_whole(folder):
        return folder
    check_device(device)
    with alone(parent / f".{folder.name}.lock", lambda: say("another process is making this pair: waiting for it")):
        if is_whole(folder):  # by the process that was waited for
            return folder
        partial = parent / f".{folder.name}.partial"
        for leftover in (partial, folder):  # of a process that was killed; damaged
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir()
        try:
            make_pair(settings, corpus, device, partial, say)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def new_pair(settings: PairSettings, device: str, folder: Path, say: Callable[[str], None]) -> Path:
    """Train a pair into a folder that is empty or absent. Raises InputError for any other, and as cached_pair does."""
    check_device(device)
    folder = folder.absolute()
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise InputError(
                f"{folder} is not empty",
                consequence="nothing was trained or overwritten",
                remedy="name an empty folder, or none: the pair then goes to the cache",
            )
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".partial-"))
    except OSError as error:
        raise InputError(
            f"{folder}: {error.strerror}", consequence="nothing was trained", remedy="name a folder that you may write"
        ) from error
    try:
        make_pair(settings, standard_library(), device, partial, say)
        partial.chmod(0o755)  # a temporary folder is its owner's alone
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def is_whole(folder: Path) -> bool:
    """Whether a folder holds a pair with every file as it was written."""
    try:
        files = json.loads((folder / FACTS).read_bytes())["files"]
        parts = {name.partition("/")[0] for name in files}
        return parts == {*PARTS, PROMPTS} and all(
            hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest for name, digest in files.items()
        )
    except (OSError, ValueError, KeyError):
        return False
