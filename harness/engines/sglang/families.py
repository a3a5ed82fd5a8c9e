"""SGLang's own model classes of the families that are not in served/: imported for the cases that use them alone.

An import of MiMo-V2 takes a second, and SGLang's Step3p5MTP has the name of a class in served/mtp.py. Called by boot.py in the
process of one configuration. Seen on 0.5.23.
"""

import importlib
from typing import Any

# Family of a recipe -> modules with the target's and the draft's classes
_MODULES = {
    "mimo_v2": ("sglang.srt.models.mimo_v2", "sglang.srt.models.mimo_v2_nextn"),
    "step3p5": ("sglang.srt.models.step3p5", "sglang.srt.models.step3p5_mtp"),
}


def register(family: str) -> None:
    """Have SGLang's registry know the family's classes. Raises ModuleNotFoundError on a release that has none."""
    from sglang.srt.models.registry import ModelRegistry

    for name in _MODULES.get(family, ()):
        entry: Any = importlib.import_module(name).EntryClass
        for found in entry if isinstance(entry, list) else [entry]:
            ModelRegistry.models[found.__name__] = found
