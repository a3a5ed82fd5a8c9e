"""A kernel that reaches cached prefixes by raw address: these are registered with the fast runtime.

Up to 0.5.17 on a CPU too, later on other machines only, write_cache_indices gives its kernel the addresses of the requests'
prefix tensors. They are at the kernel's disposal for as long as that call lasts.
"""

import inspect
import sys
from typing import Any

from eagletwin.harness.engines.triton_cpu import LivePools

from ..blame import hand_on

_NAME = "write_cache_indices"
_MODULES = ("sglang.srt.mem_cache.allocation", "sglang.srt.mem_cache.common")  # from 0.5.16 on, before


def register_in(pools: LivePools) -> None:
    """From now on kernels reach the prefixes that they are given, and no other memory."""
    for module in map(sys.modules.get, _MODULES):
        original = getattr(module, _NAME, None)
        if original is not None:
            setattr(module, _NAME, _registering(original, pools))


def _registering(original: Any, pools: LivePools) -> Any:
    signature = inspect.signature(original)

    def write(*args: Any, **kwargs: Any) -> Any:
        prefixes = hand_on(signature.bind, *args, **kwargs).arguments["prefix_tensors"]
        names = {f"prefix of request {n}": prefix for n, prefix in enumerate(prefixes) if len(prefix)}
        for name, prefix in names.items():
            pools.register(name, prefix)
        try:
            return hand_on(original, *args, **kwargs)
        finally:
            for name in names:
                pools.forget(name)

    return write
