"""Experts in float32 on a GPU, for which SGLang's kernels are not written: what is changed so that they compute in float32.

A served model has bfloat16, and nothing is changed for it. Called by boot.py once a family's model classes are imported.
"""

import sys

from eagletwin.harness.core.patch import Edit

from .. import patches

_FUSED = "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe._fused_moe_kernel_sequence"
_NEXTN = "sglang.srt.models.deepseek_nextn"


def compute_in_float32(shims: list[str]) -> None:
    """Change them, once in a process. Raises PatchFailed where a release has other code."""
    if any(_FUSED in shim for shim in shims):
        return
    # any type but bfloat16 is multiplied in float32 and then rounded to float16
    patches.rewrite(
        Edit(
            target=_FUSED,
            match="compute_type = tl.bfloat16 if hidden_states.dtype == torch.bfloat16 else tl.float16",
            replacement="compute_type = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}"
            ".get(hidden_states.dtype, tl.float16)",
        )
    )
    shims.append(f"{_FUSED}: products of experts in float32 stay float32, and are not rounded to float16")
    nextn = sys.modules.get(_NEXTN)
    if nextn is not None and hasattr(nextn, "fused_eh_norm"):
        nextn._is_cuda = False  # type: ignore[attr-defined]
        shims.append(f"{_NEXTN}: two norms and a concatenation in place of fused_eh_norm, which knows no float32")
