"""Layers that keep a state, in float32 on a GPU: what is changed so that SGLang's models compute in float32.

The kernels of the gated delta rule's chunked prefill are compiled for any type; a check in front of them admits 16 bits alone,
and one of them merges its blocks in TF32. A scan (Mamba-2) needs nothing. Of Qwen3.5 one kernel has the norms, the rotation
and the gate of its attention, and rounds to bfloat16 whatever it is given: SGLang's own layers run in its place. Called by
boot.py.
"""

import importlib
import sys
from typing import Any

from eagletwin.harness.core.patch import Edit

from .. import patches

_RULE = "sglang.kernels.ops.attention.fla.chunk.chunk_gated_delta_rule"
_QWEN = "sglang.srt.models.qwen3_5"
_PREPARE = f"{_QWEN}.Qwen3_5AttentionDecoderLayer._prepare_qkv_gate"
_MERGE, _PRECISION = "sglang.kernels.ops.attention.fla.chunk_fwd", "_MERGE_DOT_PRECISION"


def compute_in_float32(shims: list[str]) -> None:
    """Change them, once in a process. Raises PatchFailed and ModuleNotFoundError where a release has other code."""
    if any(_RULE in shim for shim in shims):
        return
    from triton import language

    patches.rewrite(Edit(target=_RULE, match="assert q.dtype != torch.float32, (", replacement="assert True, ("))
    shims.append(f"{_RULE}: its kernels take float32 too")
    merge: Any = importlib.import_module(_MERGE)
    setattr(merge, _PRECISION, language.constexpr("ieee"))
    shims.append(f"{_MERGE}.{_PRECISION}: float32, where it is TF32")


def rotate_in_float32(shims: list[str]) -> None:
    """Change Qwen3.5's attention where it is imported, once in a process. Raises PatchFailed where a release has other code."""
    if _QWEN not in sys.modules or any(_PREPARE in shim for shim in shims):
        return
    patches.rewrite(Edit(target=_PREPARE, match="if _is_cuda and self.attn_output_gate:", replacement="if False:"))
    shims.append(f"{_PREPARE}: norms, rotation and gate by SGLang's own layers, in place of a kernel that rounds to bfloat16")
