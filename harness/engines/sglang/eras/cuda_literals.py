"""SGLang up to 0.5.15.post1 writes device="cuda" where it means the device of the batch.

Seen in the draft loop of the multi-layer worker and in EagleVerifyInput.create_idle_input, 0.5.9 to 0.5.15.post1.
"""

import inspect
import sys
from typing import Any

_MODULES = ("sglang.srt.speculative.eagle_info", "sglang.srt.speculative.multi_layer_eagle_worker_v2")


def install(shims: list[str]) -> None:
    """Let torch.full and torch.empty make on the CPU what is asked for on "cuda", where this SGLang asks for it."""
    import torch

    if torch.cuda.is_available():
        return
    if not any('device="cuda"' in inspect.getsource(sys.modules[name]) for name in _MODULES if name in sys.modules):
        return
    for name in ("full", "empty"):
        original = getattr(torch, name)

        def on_the_host(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
            if kwargs.get("device") == "cuda":
                kwargs["device"] = "cpu"
            return _original(*args, **kwargs)

        setattr(torch, name, on_the_host)
    shims.append('torch.full, torch.empty: device="cuda" is the CPU')
