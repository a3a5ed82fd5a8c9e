"""What SGLang compiles with on a GPU machine, and which of its packages for a GPU are there."""

import importlib.util
import os
import shutil
from pathlib import Path

from eagletwin.harness.core.environment import ABSENT, installed

# Module, package, and what lacks without it. Where a release has no need of one, its absence is no fault.
_PACKAGES = (
    ("cutlass", "nvidia-cutlass-dsl", "0.5.23 imports it with every Llama; install nvidia-cutlass-dsl"),
    ("flashinfer", "flashinfer-python", "0.5.23 compiles tree sampling with its headers; install flashinfer-python"),
    ("flash_mla", "sgl-flash-mla", "`--attention flashmla` alone; install sgl-flash-mla"),
)


def gpu_tools() -> list[tuple[str, str, bool, str]]:
    """What, what was found, whether it is there, and what to do."""
    home = cuda_home()
    nvcc = home / "bin" / "nvcc" if home is not None else None
    found = [
        _file("nvcc", nvcc, "0.5.23 compiles kernels when they are first used; install CUDA's toolkit, or set CUDA_HOME"),
        _file("libcudart.so", home and home / "lib64" / "libcudart.so", "kernels are linked with it; set CUDA_HOME"),
        _file("curand.h", _curand(home), "FlashInfer's sampling includes it; name its folder in CPATH"),
        _file("ninja", shutil.which("ninja"), "install ninja: it starts the compilers"),
    ]
    for module, package, remedy in _PACKAGES:
        there = importlib.util.find_spec(module) is not None
        version = installed(package)
        found.append((module, "not installed" if not there else "there" if version == ABSENT else version, there, remedy))
    return found


def cuda_home() -> Path | None:
    """The CUDA toolkit: $CUDA_HOME, where the nvcc of the path lies, or the usual place, as that nvcc may be a script."""
    named, nvcc = os.environ.get("CUDA_HOME"), shutil.which("nvcc")
    if named:
        return Path(named)
    places = [Path(nvcc).resolve().parents[1]] if nvcc else []
    return next(
        (place for place in (*places, Path("/usr/local/cuda")) if (place / "include" / "cuda_runtime.h").exists()), None
    )


def _file(what: str, file: Path | str | None, remedy: str) -> tuple[str, str, bool, str]:
    there = file is not None and Path(file).exists()
    return what, str(file) if there else "not found", there, remedy


def _curand(home: Path | None) -> Path | None:
    """The header in the toolkit, or among the packages of NVIDIA's that pip installs."""
    found = importlib.util.find_spec("nvidia")
    packages = [Path(place) / "cu13" for place in (found.submodule_search_locations or ())] if found is not None else []
    places = [place / "include" / "curand.h" for place in (*([home] if home is not None else []), *packages)]
    return next((place for place in places if place.is_file()), None)
