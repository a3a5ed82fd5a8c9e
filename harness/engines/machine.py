"""The machine of an engine: what CUDA lacks on it, and when a compiler runs there."""

import importlib.util
import os
import select
import socket
import time
from pathlib import Path

from eagletwin.harness.core.run_spec import Attention
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


# Time in which a compiler runs does not count against a limit: SGLang compiles kernels when they are first used.
#
# nvcc takes from seconds to minutes for one. A worker that was ended meanwhile would take the compiler with it, and so would
# the next. One process compiles and others wait for its lock, so a compiler counts for all engines of the session (as `setsid`
# means it) that it runs in.

# As the kernel names a process, which is up to 15 letters of its program: CUDA's compilers, those for C++, and who calls them.
_COMPILERS = frozenset(
    (
        *("nvcc", "cicc", "cudafe++", "ptxas", "ptxas-blackwell", "fatbinary", "nvlink", "ninja"),
        *("g++", "c++", "cc1plus", "clang++", "gcc", "cc1", "ld", "collect2"),
    )
)
# FlashInfer's largest module takes two minutes on two cores. More than this in one case is no compiler that will end.
MOST_SECONDS = 900.0
# How often a watcher looks. A compiler that ends in less is not seen, and need not be.
LOOK_SECONDS = 2.0


def compiler_runs() -> bool:
    """Whether a compiler runs in this process's session."""
    session = os.getsid(0)
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text(errors="replace")
        except OSError:  # it has ended
            continue
        begin, end = stat.index("("), stat.rindex(")")
        if stat[begin + 1 : end] in _COMPILERS and int(stat[end + 1 :].split()[3]) == session:
            return True
    return False


class CompileTime:
    """Counts the time in which a compiler runs, for a watcher that looks every LOOK_SECONDS."""

    def __init__(self) -> None:
        self._looked = time.monotonic()
        self._left = MOST_SECONDS

    def since_last_look(self) -> float:
        """Seconds that have gone by since the last look, if a compiler runs now; else 0, as before it is time for a look."""
        now = time.monotonic()
        gone = now - self._looked
        if gone < 0.9 * LOOK_SECONDS:  # who was woken by something else comes early
            return 0.0
        self._looked = now
        if self._left <= 0 or not compiler_runs():
            return 0.0
        gone = min(gone, self._left)
        self._left -= gone
        return gone


def answers_within(connection: socket.socket, seconds: float) -> bool:
    """Wait until something can be read from a connection, or it has ended; False if that takes longer."""
    compiled, end = CompileTime(), time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if select.select([connection], [], [], min(left, LOOK_SECONDS))[0]:
            return True
        end += compiled.since_last_look()
    return False
