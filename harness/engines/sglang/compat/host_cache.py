"""SGLang's hierarchical cache: a second pool of rows in the host's memory, which the prefix cache writes to and loads from.

On a GPU SGLang's own kernels copy them, in streams of their own; on a CPU late_copies.py does.
"""

import contextlib
import importlib
import inspect
from typing import Any

from eagletwin.harness.core.case import SGLangSettings
from eagletwin.harness.core.mode import Device

from ..blame import NotDriven
from ..stand_ins import late_copies

_COPIERS = ("sglang.srt.mem_cache.pool_host.mha", "sglang.srt.mem_cache.pool_host.mla", "sglang.srt.mem_cache.pool_host.mamba")
_STREAMED = ("sglang.srt.mem_cache.l2_transfer", "sglang.srt.managers.cache_controller")


def arguments(settings: SGLangSettings, page_size: int, device: Device) -> dict[str, Any]:
    """SGLang has a padding page beside those of its ratio; half a slot keeps the ratio from being rounded down."""
    if not settings.host_pages:
        return {}
    return {
        "enable_hierarchical_cache": True,
        "hicache_ratio": ((settings.host_pages - 1) * page_size + 0.5) / settings.max_total_tokens,
        "hicache_write_policy": settings.host_policy,
        "hicache_io_backend": "kernel" if device == "cuda" else "direct",  # on a GPU what users have by default
        "hicache_mem_layout": "layer_first",
    }


def pages(scheduler: Any) -> int:
    """How many pages of the host a scheduler's prefix cache has."""
    controller = getattr(scheduler.tree_cache, "cache_controller", None)
    return 0 if controller is None else int(controller.mem_pool_host.size) // int(scheduler.page_size)


def _merges_writes() -> bool:
    """Whether the controller puts writes off and merges them, as it does where its parts are those that the taps know."""
    with contextlib.suppress(ImportError):
        controller: Any = importlib.import_module("sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller")
        return "flush" in inspect.signature(controller.HybridCacheController.write).parameters
    return False


def prepare(shims: list[str], device: Device) -> None:
    """Before a scheduler with a hierarchical cache is built. Raises NotDriven for a release whose cache is another one."""
    if not _merges_writes():
        raise NotDriven(
            "a hierarchical cache: of this release it has other parts (0.5.21 and later have those that are driven)"
        )
    base: Any = importlib.import_module("sglang.srt.mem_cache.pool_host.base")
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    shims.append("pool_host.base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0: a host pool of a case is some kilobytes")
    if device == "cuda":
        return
    for name in _COPIERS:
        importlib.import_module(name).transfer_kv_direct = late_copies.transfer_kv_direct  # type: ignore[attr-defined]
        shims.append(f"{name}.transfer_kv_direct: late_copies.py, from its semantics")
    for name in _STREAMED:
        importlib.import_module(name).device_module = late_copies  # type: ignore[attr-defined]
        shims.append(f"{name}.device_module: late_copies.py, which copies as late as what waits for it allows")
    common: Any = importlib.import_module("sglang.srt.mem_cache.pool_host.common")
    common._cuda_host_register = lambda *_args, **_named: None
    shims.append("pool_host.common._cuda_host_register: does nothing; there is no GPU to tell of the host's memory")
