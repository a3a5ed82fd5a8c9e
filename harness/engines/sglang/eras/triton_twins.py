"""Which implementation a module of SGLang takes: its flags say so, and here they must lead to the release's Triton kernels.

From 0.5.16 on `_is_cpu` leads to sgl_kernel's C++ ops for CPUs; from 0.5.15 on `_is_xpu` leads to Triton twins of CUDA C++
kernels. Where no flag suits, several functions fall through every branch and return without having done anything. For
what releases before 0.5.15 have in CUDA C++ alone, see tree_kernels.py.
"""

import sys

# Modules whose `_is_cpu` branch calls sgl_kernel's C++ ops, and whose other branch calls the release's own Triton kernels.
_INSTEAD_OF_CPU_OPS = ("sglang.kernels.ops.", "sglang.srt.speculative.", "sglang.srt.mem_cache.")
# Modules whose Triton kernels sit behind the XPU flag.
_BEHIND_XPU = (
    "sglang.kernels.ops.speculative.",
    "sglang.srt.speculative.eagle_utils",
    "sglang.srt.speculative.triton_ops.",  # 0.5.15
)


def choose(shims: list[str]) -> None:
    """Set the flags of the modules that are imported by now, and say so in `shims`; again after other imports."""
    for name in sorted(name for name in sys.modules if name.startswith((*_INSTEAD_OF_CPU_OPS, *_BEHIND_XPU))):
        module = sys.modules[name]
        flags = getattr(module, "__dict__", {})
        if name.startswith(_INSTEAD_OF_CPU_OPS) and flags.get("_is_cpu") is True:
            module._is_cpu = False  # type: ignore[attr-defined]
            shims.append(f"{name}._is_cpu = False")
        if name.startswith(_BEHIND_XPU) and flags.get("_is_xpu") is False:
            module._is_xpu = True  # type: ignore[attr-defined]
            shims.append(f"{name}._is_xpu = True")
