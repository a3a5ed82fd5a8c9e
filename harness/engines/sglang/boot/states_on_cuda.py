"""Layers that keep a state, in float32 on a GPU: what is changed so that SGLang's models compute in float32.

The kernels of the gated delta rule's chunked prefill are compiled for any type; a check in front of them admits 16 bits alone,
and one of them merges its blocks in TF32. Qwen3.5's kernel of norms and rotation rounds to bfloat16 whatever it is given. A
scan (Mamba-2) needs nothing. Called by boot.py once a family's model classes are imported.
"""

import importlib
import sys
from typing import Any

from eagletwin.harness.core.patch import Edit

from .. import patches

_RULE = "sglang.kernels.ops.attention.fla.chunk.chunk_gated_delta_rule"
_MERGE, _PRECISION = "sglang.kernels.ops.attention.fla.chunk_fwd", "_MERGE_DOT_PRECISION"
_QWEN = "sglang.srt.models.qwen3_5"
_PREPARES = f"{_QWEN}.Qwen3_5AttentionDecoderLayer._prepare_qkv_gate"


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
    if _QWEN in sys.modules:
        patches.rewrite(
            Edit(target=_PREPARES, match="if _is_cuda and self.attn_output_gate:", replacement="if False:"),
        )
        shims.append(f"{_PREPARES}: norms and rotation of their own, as the kernel of all three rounds to bfloat16")
