"""What a CUDA engine lacks on this machine."""

import importlib.util
from pathlib import Path

from eagletwin.harness.core.mode import Attention
from eagletwin.harness.core.terminal import count


def missing_for_cuda(gpus: int = 1, attention: Attention = "triton") -> tuple[str, str] | None:
    """What the CUDA engine lacks here for a worker on this many GPUs, and what to do about it; None if nothing."""
    import torch

    if torch.version.cuda is None:
        return "this torch is built without CUDA", "install a build of torch with CUDA on a machine with an NVIDIA GPU"
    if not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU", "run it where `nvidia-smi` shows one (docs/guide/gpu.md)"
    if torch.cuda.device_count() < gpus:
        return (
            f"torch sees {count(torch.cuda.device_count(), 'GPU')}, and {gpus} ranks need one each",
            "run it where there are more",
        )
    for package, name in (("sgl_kernel", "SGLang's CUDA kernels (sgl_kernel)"), ("sglang", "sglang")):
        if importlib.util.find_spec(package) is None:
            return f"{name} cannot be found", "install SGLang with its dependencies, or source the setup.sh of a bundle"
    if attention == "flashinfer" and importlib.util.find_spec("flashinfer") is None:
        return "FlashInfer cannot be found", "install flashinfer-python"
    if attention == "flashmla" and importlib.util.find_spec("flash_mla") is None:
        return "FlashMLA cannot be found", "install sgl-flash-mla"
    return _missing_for_fa3() if attention == "fa3" else None


def _missing_for_fa3() -> tuple[str, str] | None:
    """The same, of FlashAttention 3: a Hopper GPU, and the library of its kernels."""
    import torch

    if torch.cuda.get_device_capability()[0] != 9:
        return f"FlashAttention 3 is run on Hopper, and this is {torch.cuda.get_device_name()}", "leave --attention fa3 out"
    found = importlib.util.find_spec("sgl_kernel")
    folders = [Path(folder) for folder in (found.submodule_search_locations or ())] if found is not None else []
    if not any(file for folder in folders for file in folder.glob("flash_ops*.so")):
        return (
            "sgl_kernel has no flash_ops, FlashAttention's kernels",
            "install sglang-kernel whole",
        )
    return None
