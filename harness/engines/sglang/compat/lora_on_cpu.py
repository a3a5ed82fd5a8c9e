"""SGLang's adapters (LoRA) on a CPU: they ask for pinned memory, which torch has none of without a GPU, and `csgmv` looks for
block sizes by the name of the GPU.

Called by boot.py for cases with adapters on a CPU. Seen on 0.5.20 and 0.5.23.
"""

import contextlib
import importlib
from typing import Any

from ..blame import hand_on

_FACTORIES = ("arange", "empty", "tensor", "zeros")
# Where a release has the kernels of adapters: 0.5.22 and later, 0.5.16 to 0.5.21, those before.
_HOMES = ("sglang.kernels.ops.lora.dense", "sglang.kernels.ops.gemm", "sglang.srt.lora.triton_ops")


def prepare(shims: list[str]) -> None:
    """Let torch make and keep tensors unpinned that are to be pinned, and the CPU have a name."""
    import torch

    for name in _FACTORIES:
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    shims.append(f"{', '.join(f'torch.{name}' for name in _FACTORIES)}, Tensor.pin_memory: no pinned memory")
    for home in _HOMES:
        with contextlib.suppress(ModuleNotFoundError):
            tuning: Any = importlib.import_module(f"{home}.lora_tuning_config")
            tuning.get_device_name = lambda: "cpu"  # there is no file of block sizes for it, as for most GPUs
            shims.append("lora_tuning_config.get_device_name: cpu")


def _unpinned(original: Any) -> Any:
    def make(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:  # noqa: ARG001
        return hand_on(original, *args, **kwargs)

    return make
