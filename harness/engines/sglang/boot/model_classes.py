"""SGLang's own model classes of the families that are not in served/: imported for the cases that use them alone.

An import of MiMo-V2 takes a second or more, so the zygote makes it once, before it forks the first engine that needs it; but
SGLang's Step3p5MTP has the name of a class in served/mtp.py, so classes are registered by boot.py in the process of one
configuration. Seen on 0.5.23.
"""

import importlib
import importlib.util
import re
from pathlib import Path
from typing import Any

from ..early_imports import import_early
from ..stand_ins import kept_configuration


def register(modules: tuple[str, ...], shims: list[str] | None = None) -> None:
    """Have SGLang's registry know the classes of these modules. Raises ModuleNotFoundError on a release that has none.

    shims: told what the classes were given in place of transformers' own."""
    from sglang.srt.models.registry import ModelRegistry

    kept_configuration.stand_in()
    for name in modules:
        entry: Any = importlib.import_module(name).EntryClass
        for found in entry if isinstance(entry, list) else [entry]:
            ModelRegistry.models[found.__name__] = found
            stands = issubclass(found, kept_configuration.KeptConfiguration)
            if shims is not None and stands and kept_configuration.SHIM not in shims:
                shims.append(kept_configuration.SHIM)


def prepare(modules: tuple[str, ...], shims: list[str]) -> None:
    """Import these modules, and register nothing: a process that is forked from this one then has them at once."""
    kept_configuration.stand_in()
    import_early(modules, shims)


def find(classes: list[str]) -> None:
    """Have SGLang's registry know these of SGLang's own classes, where it does not: found by the source that defines them."""
    from sglang.srt.models.registry import ModelRegistry

    for name in classes:
        if name not in ModelRegistry.models:
            register(tuple(_modules_with(name)))


def _modules_with(name: str) -> list[str]:
    found = importlib.util.find_spec("sglang.srt.models")
    places = found.submodule_search_locations if found is not None else None
    files = sorted(file for place in places or () for file in Path(place).glob("*.py"))
    defines = re.compile(rf"^class {re.escape(name)}\b", re.MULTILINE)
    return [f"sglang.srt.models.{file.stem}" for file in files if defines.search(file.read_text(encoding="utf-8"))]
