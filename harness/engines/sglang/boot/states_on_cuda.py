"""Layers that keep a state, in float32 on a GPU: what is changed so that SGLang's models compute in float32.

The kernels of the gated delta rule's chunked prefill are compiled for any type; a check in front of them admits 16 bits alone,
and one of them merges its blocks in TF32. A scan (Mamba-2) needs nothing. Called by boot.py.
"""

import importlib
from typing import Any

from eagletwin.harness.core.patch import Edit

from .. import patches

_RULE = "sglang.kernels.ops.attention.fla.chunk.chunk_gated_delta_rule"
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
