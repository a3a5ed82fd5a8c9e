"""What the gated delta rule of SGLang's Qwen3-Next and Qwen3.5 needs on a CPU.

Prefill alone is replaced: stand_ins/delta_rule.py says why. Called by state_layers.py. Seen on 0.5.13 to 0.5.23.
"""

import contextlib
import importlib
import sys
from typing import Any

import torch

from ..stand_ins import delta_rule

KERNELS = "sglang.srt.layers.attention.linear.kernels.gdn_triton"
# In which is_cpu() must be False
MODULES = (
    "sglang.srt.configs.qwen3_next",
    "sglang.srt.models.qwen2_moe",
)
GATES = ()
# Of Qwen3.5, whose heads it norms: it asks a GPU how many processors it has, and shares the rows out among them
_NORM = "sglang.kernels.ops.attention.fla.layernorm_gated"


def complete(shims: list[str]) -> None:
    kernels: Any = sys.modules[KERNELS]
    kernels.chunk_gated_delta_rule = delta_rule.chunk_gated_delta_rule
    with contextlib.suppress(ModuleNotFoundError):  # up to 0.5.15.post1 it lies elsewhere, and Qwen3-Next has another norm
        norm: Any = importlib.import_module(_NORM)
        norm._get_sm_count = lambda device: 1
        shims.append(f"{_NORM}: one processor, so that a block has several rows")
    if torch.version.cuda is not None:  # it names a GPU although none may be used
        asked = torch.get_device_module
        torch.get_device_module = lambda device=None: torch.cpu if device is None else asked(device)  # type: ignore[assignment]
        shims.append("torch.get_device_module: the CPU's where none is named")
    shims.append("gdn_triton.chunk_gated_delta_rule (prefill alone): delta_rule.py, the recurrence in torch")
