"""Which SGLang an engine runs: the installed one, a published release from the cache, or a source tree as it is."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from eagletwin.harness.errors import InputError
from eagletwin.harness.paths import cache_folder


@dataclass(frozen=True, slots=True)
class Source:
    """An SGLang. `paths` come before everything else on the engine processes' sys.path; empty: what is installed here.

    name  what the user calls it: "" of the installed one, a release, or a folder
    """

    name: str = ""
    paths: tuple[Path, ...] = ()


INSTALLED = Source()


def resolve(name: str) -> Source:
    """The SGLang of this name. Raises InputError if there is none."""
    if not name:
        return INSTALLED
    if os.sep in name or Path(name).is_dir():
        return _tree(Path(name).absolute())
    release = cache_folder("releases") / name
    if not (release / "sglang").is_dir():
        raise InputError(f"no release {name}", consequence="nothing was run", remedy="name a release or a folder")
    return Source(name, (release, *_layers(release)))


def _tree(folder: Path) -> Source:
    for root in (folder, folder / "python"):
        if (root / "sglang" / "__init__.py").is_file():
            return Source(str(folder), (root, *_layers(root)))
    raise InputError(f"{folder} holds no sglang", consequence="nothing was run", remedy="name the root of a checkout")


def _layers(root: Path) -> tuple[Path, ...]:
    """Packages that this SGLang pins and this environment has in another version."""
    for text in [*root.glob("sglang-*.dist-info/METADATA"), root / "pyproject.toml"]:
        found = re.search(r"\btransformers==([\w.]+)", text.read_text()) if text.is_file() else None
        if found and (layer := cache_folder("layers") / f"transformers-{found[1]}").is_dir():
            return (layer,)
    return ()
