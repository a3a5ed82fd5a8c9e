"""What the gated delta rule of SGLang's Qwen3-Next needs on a CPU. Prefill alone is replaced: stand_ins/delta_rule.py says why.

Called by state_layers.py. Seen on 0.5.13 to 0.5.23.
"""

import sys
from typing import Any

from ..stand_ins import delta_rule

KERNELS = "sglang.srt.layers.attention.linear.kernels.gdn_triton"
# In which is_cpu() must be False
MODULES = (
    "sglang.srt.configs.qwen3_next",
    "sglang.srt.models.qwen2_moe",
)
GATES = ()


def complete(shims: list[str]) -> None:
    kernels: Any = sys.modules[KERNELS]
    kernels.chunk_gated_delta_rule = delta_rule.chunk_gated_delta_rule
    shims.append("gdn_triton.chunk_gated_delta_rule (prefill alone): delta_rule.py, the recurrence in torch")
