"""SGLang's own model classes of the families that are not in served/: imported for the cases that use them alone.

An import of MiMo-V2 takes a second or more, so the zygote makes it once, before it forks the first engine that needs it; but
SGLang's Step3p5MTP has the name of a class in served/llama.py, so classes are registered by boot.py in the process of one
configuration. Seen on 0.5.23.
"""

import importlib
from typing import Any

from eagletwin.harness.engines.inside.own_loader import import_early

from ..stand_ins import stubs

_FAILED = list[str]()  # early imports of models that failed, a line each


def register(modules: tuple[str, ...], shims: list[str] | None = None) -> None:
    """Have SGLang's registry know the classes of these modules. Raises ModuleNotFoundError on a release that has none.

    shims: gets what the classes were given in place of transformers' own, and which early import failed."""
    from sglang.srt.models.registry import ModelRegistry

    stubs.stand_in_for_pretrained()
    if shims is not None:
        shims += [line for line in _FAILED if line.partition(":")[0] in modules and line not in shims]
    for name in modules:
        entry: Any = importlib.import_module(name).EntryClass
        for found in entry if isinstance(entry, list) else [entry]:
            ModelRegistry.models[found.__name__] = found
            stands = issubclass(found, stubs.KeptConfiguration)
            if shims is not None and stands and stubs.PRETRAINED_SHIM not in shims:
                shims.append(stubs.PRETRAINED_SHIM)


def prepare(modules: tuple[str, ...]) -> None:
    """Import these modules, and register nothing: a process that is forked from this one then has them at once. One that fails
    is no shim of engines that are forked for other models."""
    stubs.stand_in_for_pretrained()
    import_early(modules, _FAILED)
