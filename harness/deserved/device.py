"""Where torch may compute: on the CPU, or on a GPU that it sees. No SGLang has to be there."""

from eagletwin.harness.core.errors import InputError


def check_device(device: str) -> None:
    """Raises InputError for a GPU that torch does not see."""
    import torch  # the command line reads the options before that

    if device == "cuda" and not torch.cuda.is_available():
        raise InputError(
            "torch is built without CUDA" if torch.version.cuda is None else "torch sees no NVIDIA GPU",
            consequence="nothing was run",
            remedy="use --device cpu, or a machine where `nvidia-smi` shows a GPU and torch has CUDA",
        )
