"""What the Mamba-2 layers of SGLang's Nemotron-H need on a CPU, and its experts, whose kernels are a GPU's.

All kernels of these layers run, prefill's chunks among them. A GPU chooses the tiles of some by the clock; here they are the
smallest, so that there are several. Of the experts, torch's own code for a CPU knows neither their activation nor the type of
the router's product. Called by state_layers.py. Seen on 0.5.23.
"""

import contextlib
import importlib
import math
from typing import Any

import torch

_MIXER = "sglang.srt.layers.attention.mamba.mamba"
_CONVOLUTIONS = "sglang.kernels.ops.mamba.causal_conv1d_triton"
_CHUNKS = "sglang.kernels.ops.mamba.triton_ops"
_TUNED = ("ssd_bmm", "ssd_chunk_scan", "ssd_chunk_state", "ssd_state_passing")
# In which is_cpu() must be False
MODULES = (_MIXER,)
_ACTIVATION = 'elif moe_runner_config.activation == "gelu":'
GATES = (
    (
        "sglang.srt.layers.moe.fused_moe_native.moe_forward_native",
        _ACTIVATION,
        f'elif moe_runner_config.activation == "relu2":\n    act = lambda x: x.relu().square()\n{_ACTIVATION}',
    ),
    (
        "sglang.srt.models.nemotron_h.NemotronHMoE._forward_core_normal",
        "hidden_states, self.gate.weight.t(), out_dtype=torch.float32",
        "hidden_states, self.gate.weight.t()",
    ),
)


def complete(shims: list[str]) -> None:
    mixer: Any = importlib.import_module(_MIXER)
    convolutions = importlib.import_module(_CONVOLUTIONS)
    for name in ("causal_conv1d_fn", "causal_conv1d_update"):
        for bound in (name, f"{name}_triton"):
            setattr(mixer, bound, getattr(convolutions, name))
            shims.append(f"{_MIXER}.{bound}: the Triton kernel, as on a GPU")
    torch.cpu.device = lambda index: contextlib.nullcontext()  # type: ignore[attr-defined]
    shims.append("torch.cpu.device: there is one")
    for name in _TUNED:
        for kernel in vars(importlib.import_module(f"{_CHUNKS}.{name}")).values():
            if hasattr(kernel, "configs"):
                kernel.configs = [min(kernel.configs, key=lambda config: math.prod(config.kwargs.values()))]
        shims.append(f"{_CHUNKS}.{name}: tuned kernels take their smallest tile")
