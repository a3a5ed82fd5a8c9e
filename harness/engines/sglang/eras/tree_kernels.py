"""SGLang up to 0.5.14 builds and verifies draft trees with sgl_kernel's C++ alone, behind a flag for GPUs.

Without the flag the functions fall through all their branches and return without doing anything. Seen on 0.5.9 to
0.5.12.post1, read in 0.5.13 and 0.5.14; from 0.5.15 on Triton twins stand behind the XPU flag.
"""

import importlib
import sys

from ..stand_ins import tree_ops

# Where the flag decides about these kernels, and about nothing else that a case calls.
_FLAGGED = (
    "sglang.srt.speculative.eagle_utils",
    "sglang.srt.speculative.eagle_info_v2",  # its cache locations: a Triton kernel, behind the same flag
    "sglang.srt.speculative.triton_ops.cache_locs",  # the same from 0.5.13 on
)


def install(shims: list[str]) -> None:
    """Put our implementations where this SGLang looks for the C++ ones. Call it when the worker's modules are imported."""
    utilities = importlib.import_module("sglang.srt.speculative.eagle_utils")
    if hasattr(utilities, "_is_xpu"):
        return
    kernels = importlib.import_module("sgl_kernel")
    for function in (tree_ops.build_tree_kernel_efficient, tree_ops.verify_tree_greedy):
        setattr(kernels, function.__name__, function)
        shims.append(f"sgl_kernel.{function.__name__}: {function.__module__.rpartition('.')[2]}.py, from its semantics")
    utilities.sgl_build_tree_kernel_efficient = tree_ops.build_tree_kernel_efficient  # type: ignore[attr-defined]
    for name in _FLAGGED:
        if name in sys.modules:
            sys.modules[name]._is_cuda = True  # type: ignore[attr-defined]
            shims.append(f"{name}._is_cuda = True")
