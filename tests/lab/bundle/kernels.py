"""Compile FlashInfer's `sampling` before the GPU host needs it: nvcc takes over a minute for it there, and no GPU here.

FlashInfer takes a library that lies in `flashinfer/data/aot` as it is. Where no nvcc is here, the host compiles it when a
request first samples.
"""

import hashlib
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from eagletwin.harness.core.errors import HarnessError

from .contents import ARCH
from .unpack import cuda_home
from .wheels import digest

LIBRARY = "flashinfer/data/aot/sampling/sampling.so"
_SOURCES = ("sampling", "renorm", "flashinfer_sampling_binding")
_FOLDERS = (
    *(f"flashinfer/data/{part}/" for part in ("include", "csrc", "cccl", "cutlass", "spdlog")),
    *("tvm_ffi/", "nvidia/cu13/include/"),
)
_INCLUDED = (
    *(f"flashinfer/data/{part}" for part in ("cccl/cub", "cccl/libcudacxx/include", "cccl/thrust", "include", "csrc")),
    *(f"flashinfer/data/{part}/include" for part in ("cutlass", "cutlass/tools/util", "spdlog")),
    *("tvm_ffi/include", "tvm_ffi/3rdparty/dlpack/include", "nvidia/cu13/include"),
)
# Those of flashinfer/jit/core.py and cpp_ext.py for this module, with torch's C++ interface and Python's stable one.
_FLAGS = (
    *("-std=c++17", "-use_fast_math", "-Xfatbin=-compress-all", "--compress-mode=size", "-DNDEBUG", "-O3"),
    *(f"-DFLASHINFER_ENABLE_{kind}" for kind in ("F16", "BF16", "FP8_E4M3", "FP8_E5M2", "FP8_E8M0", "FP4_E2M1")),
    *("-DPy_LIMITED_API=0x03090000", "-D_GLIBCXX_USE_CXX11_ABI=1", "--compiler-options=-fPIC", "--expt-relaxed-constexpr"),
    *("-static-global-template-stub=false", f"-gencode=arch=compute_{ARCH}a,code=sm_{ARCH}a"),
)


def compiled_ahead(wheels: dict[str, Path], kept: Path) -> Path | None:
    """The library, compiled once and kept; None where there is no nvcc. wheels: of FlashInfer, tvm-ffi and curand, by name."""
    home = cuda_home()
    if home is None:
        return None
    nvcc = home / "bin" / "nvcc"
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    made_of = [digest(wheel) for wheel in wheels.values()], version, _FLAGS
    library = kept / f"sampling-{hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:16]}.so"
    if not library.is_file():
        with tempfile.TemporaryDirectory(prefix="eagletwin-") as scratch:
            for wheel in wheels.values():
                with zipfile.ZipFile(wheel) as archive:
                    archive.extractall(scratch, [name for name in archive.namelist() if name.startswith(_FOLDERS)])
            _compile(nvcc, home, Path(scratch)).replace(library)
    return library


def _compile(nvcc: Path, home: Path, folder: Path) -> Path:
    included = [f"-I{folder / path}" for path in _INCLUDED] + [f"-I{home / 'include'}", f"-I{sysconfig.get_path('include')}"]

    def compile_one(name: str) -> None:
        source = folder / "flashinfer" / "data" / "csrc" / f"{name}.cu"
        _run([nvcc, *_FLAGS, *included, "-c", source, "-o", folder / f"{name}.o"])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, _SOURCES))
    library = folder / "sampling.so"
    objects = [folder / f"{name}.o" for name in _SOURCES]
    _run(["g++", "-shared", *objects, f"-L{home / 'lib64'}", "-lcudart", "-o", library])
    return library


def _run(command: list[str | Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(done.stderr[-4000:], file=sys.stderr)
        raise HarnessError(
            f"{Path(command[0]).name} cannot compile FlashInfer's sampling, and says why above",
            consequence="the bundle was not packed",
            remedy="take nvcc off the path and unset $CUDA_HOME: the GPU host then compiles it when a request first samples",
        )
