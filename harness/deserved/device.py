"""Where torch may compute: on the CPU, or on a GPU that it sees. No SGLang has to be there."""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from eagletwin.harness.core.errors import InputError

if TYPE_CHECKING:
    import torch


def on(device: "torch.device") -> AbstractContextManager[object]:
    """Where new tensors go. torch's own context takes each operation through Python, so it is entered where it makes a
    difference, and once."""
    import torch

    return nullcontext() if torch.get_default_device().type == device.type else device


def check_device(device: str) -> None:
    """Raises InputError for a GPU that torch does not see."""
    import torch  # the command line reads the options before that

    if device == "cuda" and not torch.cuda.is_available():
        raise InputError(
            "torch is built without CUDA" if torch.version.cuda is None else "torch sees no NVIDIA GPU",
            consequence="nothing was run",
            remedy="use --device cpu, or a machine where `nvidia-smi` shows a GPU and torch has CUDA",
        )
