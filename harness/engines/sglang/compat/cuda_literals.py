"""SGLang up to 0.5.15.post1 writes device="cuda" where it means the device of the batch, and up to 0.5.18 that of states.

Seen in the draft loop of the multi-layer worker and in EagleVerifyInput.create_idle_input, 0.5.9 to 0.5.15.post1; and in
MambaPool, 0.5.13 to 0.5.18.
"""

import inspect
import sys
from collections.abc import Sequence
from typing import Any

from ..blame import hand_on

_MODULES = ("sglang.srt.speculative.eagle_info", "sglang.srt.speculative.multi_layer_eagle_worker_v2")
_STATES = ("sglang.srt.mem_cache.memory_pool",)


def install(shims: list[str]) -> None:
    """Let torch.full and torch.empty make on the CPU what is asked for on "cuda", where this SGLang asks for it."""
    _replace(("full", "empty"), _MODULES, shims)


def install_for_states(shims: list[str]) -> None:
    """The same of torch.zeros, which the pool of states asks."""
    _replace(("zeros",), _STATES, shims)


def _replace(functions: Sequence[str], modules: Sequence[str], shims: list[str]) -> None:
    import torch

    if torch.cuda.is_available():
        return
    if not any('device="cuda"' in inspect.getsource(sys.modules[name]) for name in modules if name in sys.modules):
        return
    for name in functions:
        original = getattr(torch, name)

        def on_the_host(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
            if kwargs.get("device") == "cuda":
                kwargs["device"] = "cpu"
            return hand_on(_original, *args, **kwargs)

        setattr(torch, name, on_the_host)
    shims.append(f'{", ".join(f"torch.{name}" for name in functions)}: device="cuda" is the CPU')
